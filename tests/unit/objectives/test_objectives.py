"""GRPO and OPD as the scheduler sees them: rows, scales, accumulators, closure, normaliser, refusals."""

from dataclasses import replace

import pytest
from oracles.advantages import advantages
from oracles.token_losses import clipped_loss, k3, sampled_reverse_kl

from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.config.root import Config
from megathunder.config.run import RunConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.advantage import Coefficients
from megathunder.objectives.base import Survivor
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.grpo import Grpo
from megathunder.objectives.overlong import overlong_penalty
from megathunder.schedule.token_chain import TokenChain, train_rows
from megathunder.types import (
    BATCH,
    AccumulatorKey,
    AccumulatorKind,
    ContributionId,
    EndReason,
    FoldTerm,
    Role,
    Row,
    Segment,
    Trajectory,
    TrajectoryId,
)


def segments(*lengths: int) -> tuple[Segment, ...]:
    """A prompt, then action, observation, action ... of the given lengths; token ids count up."""
    result, start = [], 1
    for i, length in enumerate(lengths):
        role = Role.PROMPT if i == 0 else (Role.ACTION if i % 2 else Role.OBSERVATION)
        ids = tuple(range(start, start + length))
        sampled = role is Role.ACTION
        result.append(
            Segment(
                role=role, token_ids=ids, logprobs=(-0.5,) * length * sampled, policy_versions=(0,) * length * sampled
            )
        )
        start += length
    return tuple(result)


def trajectory(*rows: tuple[int, ...], index: int = 0) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(0, 0, index),
        task_id="t",
        rows=tuple(Row(segments=segments(*r)) for r in rows),
        end_reason=EndReason.ANSWERED,
        started_s=0,
        completed_s=1,
        turns=sum(len(r) // 2 for r in rows),
    )


def test_rows_of_one_rollout_share_one_reward() -> None:
    split = trajectory((2, 1), (2, 2), (2, 1), index=1)
    got = advantages([0, 1], [2], "none")
    assert got == [-0.5, 0.5]
    assert [r.scale for r in train_rows(split, got[1])] == [0.5, 0.5, 0.5]


def test_a_row_ends_with_its_last_action_and_masks_everything_not_sampled() -> None:
    (row,) = train_rows(trajectory((3, 2, 4, 1, 6)), 1.0)
    assert row.loss_mask == (0, 0, 0, 1, 1, 0, 0, 0, 0, 1)
    assert len(row.token_ids) == 10 and row.prompt_tokens == 3 and row.cuts == (5,)


def test_sequence_mean_divides_by_the_tokens_of_the_whole_trajectory() -> None:
    objective = Grpo(config=GrpoConfig(), loss=LossConfig(normalisation="sequence_mean"))
    assert objective.row_scale(4) == 0.25
    assert objective.normaliser([Survivor(trained_tokens=4), Survivor(trained_tokens=0)]) == 2


def test_token_mean_counts_every_survivor() -> None:
    objective = Grpo(config=GrpoConfig(), loss=LossConfig())
    assert objective.normaliser([Survivor(trained_tokens=1), Survivor(trained_tokens=3)]) == 4


def test_closure_terms_are_the_coefficients_of_each_kind() -> None:
    objective = Grpo(config=GrpoConfig(), loss=LossConfig())
    keys = [
        AccumulatorKey(AccumulatorKind.CLASS, 3, 1),
        AccumulatorKey(AccumulatorKind.MOMENT, 3, 0),
        AccumulatorKey(AccumulatorKind.MOMENT, 3, 1),
    ]
    keys.append(AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, 3, 5))
    closure = objective.close(keys, [0.0, 2.0], {5: 3.0}, Coefficients(10.0, -1.0))
    assert set(closure.terms) == {
        FoldTerm(keys[0], BATCH, 19.0),
        FoldTerm(keys[1], BATCH, -1.0),
        FoldTerm(keys[2], BATCH, 10.0),
        FoldTerm(keys[3], BATCH, 29.0),
    }
    assert set(closure.free) == set(keys)


def test_a_landed_reward_moves_an_own_accumulator_into_both_moments() -> None:
    objective = Grpo(config=GrpoConfig(), loss=LossConfig())
    own, moment = AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, 0, 2), AccumulatorKey(AccumulatorKind.MOMENT, 0, 0)
    closure = objective.land(own, moment, 0.3)
    assert closure.terms == (FoldTerm(own, moment, 1.0), FoldTerm(own, moment._replace(slot=1), 0.3))
    assert closure.free == (own,)


def test_chain_row_of_one_turn_carries_context_and_trains_only_its_own_tokens() -> None:
    chain = TokenChain()
    prompt, first, observation, second = segments(2, 2, 1, 3)
    chain.append_turn([prompt, first])
    chain.append_turn([observation, second])
    chain.score_turn(1, (-1.0, -2.0, -3.0))
    assert chain.scored == 0  # turn 0 has no score yet
    chain.score_turn(0, (-4.0, -5.0))
    assert chain.scored == 2
    from megathunder.types import ContributionId

    row = chain.train_row(ContributionId(0, 0, 0, 1), row=0, context_turns=1, end_turn=2, mask_from_turn=1, scale=1.0)
    assert row.context_tokens == 4 and row.loss_mask == (0, 0, 0, 0, 0, 1, 1, 1)
    assert row.teacher_logprobs == (0.0, 0.0, -4.0, -5.0, 0.0, -1.0, -2.0, -3.0)


def test_a_row_that_runs_ahead_of_the_teacher_carries_no_scores() -> None:
    chain = TokenChain()
    chain.append_turn(segments(3, 2))
    chain.append_turn(segments(1, 4))
    chain.score_turn(0, (-1.0, -2.0))
    source = ContributionId(0, 0, 0)
    ahead = chain.train_row(source, row=0, context_turns=1, end_turn=2, mask_from_turn=1, scale=1.0)
    assert ahead.teacher_logprobs == ()
    known = chain.train_row(source, row=0, context_turns=0, end_turn=1, mask_from_turn=0, scale=1.0)
    assert len(known.teacher_logprobs) == len(known.token_ids)


def test_a_score_with_the_wrong_length_is_refused() -> None:
    chain = TokenChain()
    chain.append_turn(segments(2, 2))
    with pytest.raises(UserError, match="3 teacher"):
        chain.score_turn(0, (0.0,) * 3)


def test_scalar_terms_have_the_right_values() -> None:
    value, derivative = k3(-1.0, -1.5)
    assert (value, derivative) == pytest.approx((0.1065, 0.3935), abs=5e-5)
    got = [clipped_loss(r, a, 0.2, 0.2) for r, a in ((1.5, 1), (1.5, -1), (0.5, -1))]
    assert got == pytest.approx([-1.2, 1.5, 0.8])
    assert clipped_loss(float("inf"), 0.0, 0.2, 0.2) == 0.0 and clipped_loss(float("nan"), 0.0, 0.2, 0.2) == 0.0
    assert sampled_reverse_kl(-1, -2) == 1
    assert [overlong_penalty(t, 100, 20) for t in (80, 90, 100, 130)] == [0, -0.5, -1, -1]


def test_combinations_that_cannot_be_exact_are_refused_by_name() -> None:
    config = Config()
    for bad, text in (
        (replace(config, run=RunConfig(group_size=1)), "groups of 1"),
        (replace(config, streaming=StreamingConfig(release="turn")), "release = 'turn' with objective = 'grpo'"),
        (replace(config, objective="opd", streaming=StreamingConfig(content_ready=True)), "content_ready"),
        (replace(config, objective="opd", streaming=StreamingConfig(on_lost="drop_group")), "drop_group"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_objective(bad)
    turn = replace(config, objective="opd", streaming=StreamingConfig(release="turn"))
    assert build_objective(turn).name == "opd"
    with pytest.raises(ConfigError, match="sequence_mean"):
        build_objective(replace(turn, loss=LossConfig(normalisation="sequence_mean")))


def test_the_divergence_is_taken_from_the_reward_where_that_is_asked_for() -> None:
    attempt = trajectory((2, 3))
    for grpo, want in (
        (GrpoConfig(kl_in_reward=True, kl_coefficient=0.1), 1.0 - 0.1 * 3.0),
        (GrpoConfig(kl_coefficient=0.1), 1.0),  # a loss term of its own
        (GrpoConfig(), 1.0),
    ):
        objective = build_objective(replace(Config(), grpo=grpo))
        assert objective.shape(attempt, 1.0, 3.0) == pytest.approx(want)
        assert objective.waits_for_divergence == (want != 1.0)
