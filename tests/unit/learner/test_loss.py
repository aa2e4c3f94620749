"""Token weights and row losses against worked numbers."""

from types import SimpleNamespace

import pytest
import torch
from oracles.objective_losses import kl_k3

from megathunder.config.objective import LossConfig
from megathunder.learner.loss import TokenLoss, row_gaps
from megathunder.learner.passes.backward import WorkCounters
from megathunder.learner.passes.packing import pack, whole_rows
from megathunder.objectives.base import Objective, Survivor
from megathunder.types import ContributionId, TrainRow

INF, NAN = float("inf"), float("nan")


def batch(engine, *, scales=(1.0,), row_of=None, teacher=None):
    count = len(engine)
    return SimpleNamespace(
        pieces=[None] * len(scales),
        row_of=torch.tensor(row_of or [0] * count, dtype=torch.int64),
        scales=torch.tensor(scales, dtype=torch.float64),
        engine=torch.tensor(engine, dtype=torch.float64),
        teacher=None if teacher is None else torch.tensor(teacher, dtype=torch.float64),
        old=None,
    )


def gradient(loss, given, logprobs):
    """Total loss and its gradient in the log-probabilities."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    rows = loss.row_losses(given, leaf)
    (rows @ given.scales).backward()
    return rows.detach(), leaf.grad.tolist()


def test_weight_one_sums_negative_logprobs():
    rows, grad = gradient(TokenLoss(), batch([0.0] * 3, scales=(2.0, -1.0), row_of=[0, 0, 1]), [-1.0, -2.0, -4.0])
    assert rows.tolist() == [3.0, 4.0]
    assert grad == [-2.0, -2.0, 1.0]


def test_a_row_whose_engine_logprobs_are_not_believed_adds_nothing():
    """Row 0 has a token 20 nats off, which no importance weight may turn into a gradient."""
    given = batch([-21.0, -1.0, -1.5], scales=(-1.0, 1.0), row_of=[0, 0, 1])
    logprobs = [-1.0, -1.0, -1.0]
    assert row_gaps(given, torch.tensor(logprobs, dtype=torch.float64)).tolist() == [20.0, 0.5]
    rows, grad = gradient(TokenLoss(importance_cap=4.0, max_gap=5.0), given, logprobs)
    assert rows[0] == 0.0 and grad[:2] == [0.0, 0.0] and grad[2] < 0
    assert gradient(TokenLoss(importance_cap=4.0), given, logprobs)[1][0] == 4.0, "trained without the limit"


def test_rows_above_the_alarm_are_named_with_their_gap():
    given = batch([-21.0, -1.0, -1.5], scales=(1.0, 1.0), row_of=[0, 0, 1])
    given.pieces = [SimpleNamespace(row=SimpleNamespace(source=ContributionId(3, 0, t))) for t in (2, 5)]
    counters = WorkCounters(price=None)
    counters.gap(given, torch.full((3,), -1.0, dtype=torch.float64), 1.0)
    stats = counters.stats(accumulator_bytes=0)
    assert stats.logprob_gaps == (("u3/g0/t2", 20.0),) and (stats + stats).logprob_gaps == stats.logprob_gaps * 2


def test_student_minus_one_teacher_minus_two_costs_plus_one():
    rows, grad = gradient(TokenLoss(), batch([-1.0], teacher=[-2.0]), [-1.0])
    assert grad == [1.0]  # descending lowers a token that the student likes more than the teacher
    assert rows.tolist() == [-1.0]  # (log pi - log q) log pi


def test_importance_weights_are_truncated_and_detached():
    engine = [-1.0, -1.0]
    _rows, grad = gradient(TokenLoss(importance_cap=2.0), batch(engine), [-0.5, 1.0])
    assert grad[0] == pytest.approx(-torch.tensor(0.5).exp().item()) and grad[1] == -2.0


@pytest.mark.parametrize("ratio,advantage,moves", [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, -1.0, False)])
def test_clip_range_stops_the_gradient_where_the_surrogate_is_clipped(ratio, advantage, moves):
    clipped = min(max(ratio, 0.8), 1.2)
    value = -min(ratio * advantage, clipped * advantage)
    assert value == pytest.approx({(1.5, 1.0): -1.2, (1.5, -1.0): 1.5, (0.5, -1.0): 0.8}[(ratio, advantage)])
    loss = TokenLoss(clip_low=0.2, clip_high=0.2)
    logprob = -1.0
    engine = logprob - torch.tensor(ratio).log().item()
    _, grad = gradient(loss, batch([engine], scales=(advantage,)), [logprob])
    assert grad[0] == pytest.approx(-advantage * ratio if moves else 0.0)


@pytest.mark.parametrize("engine", [1000.0, -1000.0, NAN, INF, -INF])
@pytest.mark.parametrize("loss", [TokenLoss(), TokenLoss(importance_cap=2.0), TokenLoss(clip_high=0.2)])
def test_rows_of_scale_zero_contribute_exactly_zero(engine, loss):
    rows, grad = gradient(loss, batch([engine, -1.0], scales=(0.0, 1.0), row_of=[0, 1]), [-1.0, -1.0])
    assert grad[0] == 0.0 and grad[1] == -1.0
    assert torch.isfinite(rows).all()


@pytest.mark.parametrize("teacher", [INF, -INF, NAN])
def test_unscored_teacher_values_of_a_zero_row_do_not_leak(teacher):
    _, grad = gradient(TokenLoss(), batch([0.0], scales=(0.0,), teacher=[teacher]), [-1.0])
    assert grad == [0.0]


def test_a_row_without_trained_tokens_has_loss_zero_and_a_gradient_path():
    leaf = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    rows = TokenLoss().row_losses(batch([]), leaf)
    assert rows.tolist() == [0.0] and rows.requires_grad


def test_k3_estimate_and_its_derivative():
    value, slope = kl_k3(-1.0, -1.5)
    assert value == pytest.approx(0.1065, abs=5e-5) and slope == pytest.approx(0.3935, abs=5e-5)


def test_the_kl_term_of_a_row_is_its_k3_sum_whatever_its_scale():
    given = batch([-1.0, -1.0], scales=(0.0, 2.0), row_of=[0, 1])
    given.reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    leaf = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    rows = TokenLoss(kl_coefficient=0.1).row_divergences(given, leaf)
    rows.sum().backward()
    assert rows.tolist() == pytest.approx([kl_k3(-1.0, -1.5)[0], 0.0])
    assert leaf.grad.tolist() == pytest.approx([kl_k3(-1.0, -1.5)[1], 0.0])


@pytest.mark.parametrize("micro_batches", [[[0, 1]], [[0], [1]], [[1], [0]]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_token_mean_is_global_over_any_split_into_micro_batches_and_ranks(micro_batches, ranks):
    losses = [[4.0], [1.0, 1.0, 1.0]]  # a mean of means would be 2.5
    sums = [0.0] * ranks  # what each rank accumulates, before the one reduction and the one division
    for number, members in enumerate(micro_batches):
        flat = [-x for m in members for x in losses[m]]
        row_of = [i for i, m in enumerate(members) for _ in losses[m]]
        given = batch([0.0] * len(flat), scales=(1.0,) * len(members), row_of=row_of)
        rows, _ = gradient(TokenLoss(), given, flat)
        sums[number % ranks] += float(rows.sum())
    survivors = [Survivor(trained_tokens=len(one)) for one in losses]
    assert sum(sums) / Objective(LossConfig()).normaliser(survivors) == 1.75


def test_masked_tokens_count_neither_in_the_sum_nor_in_the_normaliser():
    def mean_of(mask):
        row = TrainRow(
            source=ContributionId(0, 0, 0), token_ids=tuple(range(len(mask))), loss_mask=mask,
            engine_logprobs=(0.0,) * len(mask),
        )  # fmt: skip
        z = Objective(LossConfig()).normaliser([Survivor(trained_tokens=sum(mask))])
        if not (pieces := whole_rows([row], weightless=True)):
            return 0.0, z
        packed = pack(pieces, torch.device("cpu"), dtype=torch.float64)
        rows = TokenLoss().row_losses(packed, torch.full((packed.trained_tokens,), -1.0, dtype=torch.float64))
        return float(rows.sum()), z

    total, z = mean_of((0,) * 5 + (1, 1) + (0,) * 3)  # loss 1 a token, 2 kept, 8 masked
    assert total / z == 1.0
    assert mean_of((0,) * 10) == (0.0, 0.0)  # nothing is computed, and a normaliser of 0 takes no step


@pytest.mark.parametrize("loss", [TokenLoss(clip_low=0.2), TokenLoss(importance_cap=1e30), TokenLoss(clip_high=0.2)])
@pytest.mark.parametrize("difference", [100.0, 1e4, -1e4])
def test_no_ratio_makes_a_gradient_infinite(loss, difference):
    given = batch([-1.0 - difference, -1.0], scales=(-1.0,))
    given.engine, given.scales = given.engine.float(), given.scales.float()
    leaf = torch.tensor([-1.0, -1.0], requires_grad=True)
    (loss.row_losses(given, leaf) @ given.scales).backward()
    assert torch.isfinite(leaf.grad).all()


def test_no_reference_makes_the_kl_term_infinite():
    given = batch([0.0])
    given.reference = torch.tensor([-1.0, 400.0])
    given.row_of = torch.tensor([0, 0])
    leaf = torch.tensor([-401.0, -1.0], requires_grad=True)
    TokenLoss(kl_coefficient=0.1).row_divergences(given, leaf).sum().backward()
    assert torch.isfinite(leaf.grad).all()
