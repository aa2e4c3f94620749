"""Which tokens a row computes, which it trains, and what is predicted from where."""

import pytest
import torch

from megathunder.errors import UserError
from megathunder.learner.passes.packing import first_computed, last_computed, pack, whole_rows
from megathunder.types import ContributionId, TrainRow

CPU = torch.device("cpu")


def row(mask, *, context=0, scale=1.0, teacher=(), first_token=10):
    length = len(mask)
    return TrainRow(
        source=ContributionId(0, 0, 0),
        token_ids=tuple(range(first_token, first_token + length)),
        loss_mask=tuple(mask),
        engine_logprobs=tuple(-float(t) for t in range(length)),
        teacher_logprobs=teacher,
        scale=scale,
        context_tokens=context,
    )


def test_mask_over_tokens_becomes_predictions_one_position_earlier():
    batch = pack(whole_rows([row([0, 0, 1, 1, 1])]), CPU, dtype=torch.float64)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13]]  # the last token is never an input
    assert batch.context.predict.tolist() == [1, 2, 3]
    assert batch.context.targets.tolist() == [12, 13, 14]
    assert batch.engine.tolist() == [-2.0, -3.0, -4.0]


def test_nothing_after_the_last_trained_token_is_computed():
    assert whole_rows([row([0, 1, 1, 0, 0])])[0].end == 2
    assert last_computed(row([0, 1, 1, 0, 0]), keep_all=True) == 5


def test_sampled_ids_are_trained_as_sampled_whatever_the_template_appends():
    # G = [20, 99] sampled, 198 appended by the chat template: mask [1, 1, 0]
    given = TrainRow(
        source=ContributionId(0, 0, 0),
        token_ids=(7, 20, 99, 198),
        loss_mask=(0, 1, 1, 0),
        engine_logprobs=(0.0, -1.0, -1.0, 0.0),
    )
    assert pack(whole_rows([given]), CPU, dtype=torch.float64).context.targets.tolist() == [20, 99]


def test_rows_lie_end_to_end_and_positions_start_anew():
    batch = pack(whole_rows([row([0, 1, 1]), row([0, 0, 0, 1], first_token=30)]), CPU, dtype=torch.float64)
    assert batch.token_ids.tolist() == [[10, 11, 30, 31, 32]]
    assert batch.context.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert batch.context.predict.tolist() == [0, 1, 4]
    assert batch.row_of.tolist() == [0, 0, 1]
    assert (batch.tokens, batch.trained_tokens) == (5, 3)


def test_rows_that_add_nothing_are_left_out():
    assert whole_rows([row([0, 1], scale=0.0), row([0, 0, 0]), row([1])]) == []


def test_a_segment_that_begins_with_a_trained_token_computes_its_predecessor_again():
    assert first_computed(row([0, 1, 1, 0, 1], context=2)) == 1
    assert first_computed(row([0, 1, 1, 0, 1], context=3)) == 3
    assert first_computed(row([1, 1], context=0)) == 0


def test_arrays_of_different_lengths_are_refused():
    bad = TrainRow(source=ContributionId(0, 0, 0), token_ids=(1, 2), loss_mask=(0, 1), engine_logprobs=(0.0,))
    with pytest.raises(UserError, match="one entry per token"):
        whole_rows([bad])


def test_scored_and_unscored_rows_do_not_mix():
    pieces = whole_rows([row([0, 1]), row([0, 1], teacher=(0.0, -1.0))])
    with pytest.raises(UserError, match="1 of 2 rows"):
        pack(pieces, CPU, dtype=torch.float64)
