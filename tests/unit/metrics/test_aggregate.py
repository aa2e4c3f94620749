"""A metric does not depend on how work was split: sums over sums, min of mins, maxima of maxima."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megathunder.accumulator_keys import BATCH
from megathunder.config.model_shape import ModelShape
from megathunder.metrics.aggregate import Clock, Outcome, UpdateTally, combine
from megathunder.metrics.flat_row import flat_row
from megathunder.metrics.summary import Summary
from megathunder.types import (
    ContributionId,
    Differentiate,
    Done,
    EndReason,
    Publish,
    Role,
    Row,
    Score,
    Segment,
    TakeStep,
    TrainRow,
    Trajectory,
    TrajectoryId,
    TurnCompleted,
    TurnScored,
    WorkStats,
)
from megathunder.work_stats import SaltStats

SHAPE = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_size=4, ffn=16, vocabulary=32)
CLOCK = Clock(first_request_s=10.0, last_signal_s=14.0, last_backward_s=15.0, acknowledged_s=15.5)


def outcome(**changes: object) -> Outcome:
    values = {
        "contributions_applied": 2,
        "dropped_by_reason": {},
        "groups_degenerate": 0,
        "normaliser": 4.0,
        "since_start_s": 9.0,
    }
    return Outcome(**{**values, **changes})  # type: ignore[arg-type]


def tally(**changes: object) -> UpdateTally:
    values = {"update": 3, "schedule": "sync", "objective": "grpo", "policy_version": 3, "shape": SHAPE}
    return UpdateTally(**{**values, **changes})  # type: ignore[arg-type]


def trajectory(group: int, index: int, reward: float, versions: tuple[int, ...] = (3, 3)) -> Trajectory:
    ids = tuple(range(len(versions)))
    action = Segment(role=Role.ACTION, token_ids=ids, logprobs=(-1.0,) * len(ids), policy_versions=versions)
    return Trajectory(
        id=TrajectoryId(3, group, index),
        task_id="t",
        rows=(Row(segments=(Segment(role=Role.PROMPT, token_ids=(1, 2)), action)),),
        end_reason=EndReason.ANSWERED,
        started_s=10.0,
        completed_s=12.0,
        turns=2,
        reward=reward,
    )


def work(tokens: int, *, seconds: float = 1.0, **stats: object) -> tuple[Differentiate, Done]:
    row = TrainRow(
        source=ContributionId(3, 0, 0),
        token_ids=(1,) * tokens,
        loss_mask=(0,) + (1,) * (tokens - 1),
        engine_logprobs=(0.0,) * tokens,
    )
    command = Differentiate(item=0, update=3, policy_version=3, target=BATCH, rows=(row,))
    done = WorkStats(tokens=tokens, **stats)  # type: ignore[arg-type]
    return command, Done(item=0, cell=0, started_s=0.0, ended_s=seconds, stats=done)


def test_min_of_mins_and_sums_over_sums() -> None:
    assert (Summary.of([1.0]) + Summary.of([5.0])).minimum == 1.0
    assert (Summary(sum=2.0, count=2) + Summary(sum=30.0, count=6)).mean == 4.0
    assert Summary().mean == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 20))
def test_a_summary_does_not_depend_on_the_split(values: list[float], cut: int) -> None:
    joined, whole = Summary.of(values[:cut]) + Summary.of(values[cut:]), Summary.of(values)
    assert joined.mean == pytest.approx(whole.mean, abs=1e-9)
    assert (joined.minimum, joined.maximum, joined.count) == (whole.minimum, whole.maximum, whole.count)


def test_stats_of_ranks_add_up_and_maxima_stay_maxima() -> None:
    both = combine(
        [
            WorkStats(tokens=3, logprob_diff_max=0.5, grad_norm=1.5, kl_sum=1.0, exposed_copy_s=2.0),
            WorkStats(tokens=4, logprob_diff_max=0.25, grad_norm=1.5, stepped=True, kl_sum=2.0, exposed_copy_s=1.0),
        ]
    )
    assert (both.tokens, both.logprob_diff_max, both.grad_norm, both.stepped) == (7, 0.5, 1.5, True)
    assert (both.kl_sum, both.exposed_copy_s, both.prompt_tokens_saved, both.salt) == (3.0, 2.0, None, None)
    salt = SaltStats(geometries=1, factor=2.0, spectrum=(0.5,), factor_max=2.0)
    joined = combine([WorkStats(salt=salt), WorkStats(), WorkStats(salt=salt + SaltStats(spectrum=(0.25, 0.125)))])
    assert joined.salt == SaltStats(geometries=2, factor=4.0, spectrum=(1.25, 0.125), factor_max=2.0)
    assert combine([]) == WorkStats()


def run(parts: Sequence[tuple[Differentiate, Done]]) -> UpdateTally:
    made = tally()
    for command, done in parts:
        made.work(command, done)
    return made


def test_the_row_does_not_depend_on_the_order_of_the_work() -> None:
    parts = [work(4, loss_sum=1.0, trained_tokens=3), work(9, loss_sum=2.0, trained_tokens=8, logprob_diff_max=0.1)]
    assert run(parts).row(CLOCK, outcome()) == run(parts[::-1]).row(CLOCK, outcome())


def test_the_parts_of_the_wall_add_up() -> None:
    row = tally().row(CLOCK, outcome())
    assert (row.rollout_s, row.tail_s, row.suffix_s, row.step_wall_s) == (4.0, 1.0, 0.5, 5.5)
    early = Clock(first_request_s=10.0, last_signal_s=14.0, last_backward_s=13.0, acknowledged_s=15.5)
    row = tally().row(early, outcome())
    assert (row.tail_s, row.suffix_s) == (0.0, 1.5), "a learner that had nothing left to do has no tail"


def test_busy_time_is_the_mean_over_cells_without_publication() -> None:
    made = tally(cells=2)
    made.work(*work(4, seconds=3.0))
    step = TakeStep(item=1, update=3, normaliser=4.0)
    for cell in (0, 1):
        made.work(step, Done(item=1, cell=cell, started_s=0, ended_s=0.5, stats=WorkStats(stepped=True, grad_norm=2.0)))
    publish = Publish(item=2, version=4, servers=())
    made.work(publish, Done(item=2, cell=0, started_s=0, ended_s=0.25, stats=WorkStats(payload_bytes=7)))
    row = made.row(CLOCK, outcome())
    assert row.learner_busy_s == (3.0 + 0.5 + 0.5) / 2
    assert row.learner_busy_share == pytest.approx(2.0 / 5.5)
    assert (row.publication_s, row.publication_bytes, row.grad_norm, row.stepped) == (0.25, 7, 2.0, True)


def test_shared_prompts_and_the_distance_from_the_reference_are_in_the_row() -> None:
    made = tally()
    assert made.row(CLOCK, outcome()).prompt_tokens_saved is None
    for saved, kl in ((30, 1.0), (12, 2.0)):
        made.work(*work(4, prompt_tokens_saved=saved, kl_sum=kl))
    row = made.row(CLOCK, outcome(normaliser=4.0))
    assert (row.prompt_tokens_saved, row.kl_to_reference) == (42, 0.75)
    inside = tally()
    inside.trajectory(trajectory(0, 0, 1.0))  # two sampled tokens
    score = Score(item=1, update=3, policy_version=3, rows=())
    inside.work(
        score, Done(item=1, cell=0, started_s=0, ended_s=1, stats=WorkStats(divergences=(0.25, 0.75), flops=10.0))
    )
    assert inside.row(CLOCK, outcome()).kl_to_reference == 0.5


def test_rewards_and_prompts() -> None:
    made = tally()
    for group, index, reward in ((0, 0, 1.0), (0, 1, 0.0), (1, 0, 0.0), (1, 1, 0.0)):
        made.trajectory(trajectory(group, index, reward))
    row = made.row(CLOCK, outcome())
    assert (row.reward_mean, row.prompt_reward_min, row.prompt_reward_max, row.prompt_best_mean) == (
        0.25,
        0.0,
        0.5,
        0.5,
    )
    assert row.reward_std == pytest.approx(math.sqrt(3) / 4)
    assert (row.trajectories, row.turns_mean, row.response_tokens_mean) == (4, 2.0, 2.0)


def test_lag_counts_every_sampled_token() -> None:
    made = tally()
    made.trajectory(trajectory(0, 0, 1.0))
    assert made.row(CLOCK, outcome()).policy_lag_max == 0
    made.trajectory(trajectory(0, 1, 1.0, versions=(2, 2, 3)))
    row = made.row(CLOCK, outcome())
    assert (row.policy_lag_max, row.tokens_by_lag) == (1, {0: 3, 1: 2})


def test_flops_come_from_the_rows_that_were_executed() -> None:
    one, two = run([work(8)]), run([work(4), work(4)])
    long, short = (made.row(CLOCK, outcome()).flops for made in (one, two))
    attention = 3 * 2 * SHAPE.layers * SHAPE.heads * SHAPE.head_size
    layers = 3 * 2 * SHAPE.active_layer_matrices
    assert long - short == attention * (49 - 2 * 9) + layers * (7 - 6) + 3 * 2 * SHAPE.embedding_parameters * (7 - 6)


def test_what_was_executed_beyond_need_is_replay() -> None:
    needed = run([work(8)]).row(CLOCK, outcome()).flops
    assert run([work(8, flops=needed)]).row(CLOCK, outcome()).replay_flops == 0
    row = run([work(8, flops=needed + 1e6)]).row(CLOCK, outcome())
    assert (row.flops, row.replay_flops) == (needed, 1e6)


def test_an_update_without_a_step_trained_nothing_and_has_no_loss() -> None:
    for stepped, trained, loss in ((True, 7, 0.5), (False, 0, None)):
        made = run([work(9, trained_tokens=8, loss_sum=99.0)])
        step = WorkStats(stepped=stepped, skip_reason="" if stepped else "no contribution has a coefficient")
        made.work(TakeStep(item=1, update=3, normaliser=4.0), Done(item=1, cell=0, started_s=0, ended_s=1, stats=step))
        row = made.row(CLOCK, outcome(trained_tokens=trained, loss_sum=2.0))
        assert (row.trained_tokens, row.differentiated_tokens, row.loss) == (trained, 8, loss)


def test_dropped_contributions_are_counted_by_reason() -> None:
    row = tally().row(CLOCK, outcome(contributions_applied=5, dropped_by_reason={"lost": 2, "stale": 1}))
    assert (row.contributions_applied, row.contributions_dropped) == (5, 3)


def test_an_update_without_anything_has_a_finite_row() -> None:
    row = tally(shape=None).row(CLOCK, outcome(contributions_applied=0, normaliser=0.0))
    numbers = [value for value in (getattr(row, n) for n in row.__struct_fields__) if isinstance(value, float)]
    assert all(math.isfinite(value) for value in numbers)


def test_teacher_divergence_is_a_token_mean() -> None:
    made = tally()
    key = TrajectoryId(3, 0, 0)
    for turn, (student, teacher) in enumerate((((-1.0, -2.0), (-2.0, -4.0)), ((-1.0,), (-1.0,)))):
        ids = tuple(range(len(student)))
        action = Segment(role=Role.ACTION, token_ids=ids, logprobs=student, policy_versions=(3,) * len(ids))
        made.note(TurnCompleted(id=key, turn=turn, row=0, segments=(action,), at_s=1.0))
        made.note(TurnScored(id=key, turn=turn, teacher_logprobs=teacher, at_s=1.0))
    assert made.row(CLOCK, outcome()).teacher_kl == 1.0
    assert tally().row(CLOCK, outcome()).teacher_kl is None


def test_contexts_and_what_caches_held_of_them_are_sums_over_turns() -> None:
    made = tally()
    action = Segment(role=Role.ACTION, token_ids=(1,), logprobs=(-1.0,), policy_versions=(3,))
    for turn, (context, cached) in enumerate(((10, 0), (30, 12))):
        counts = {"context_tokens": context, "cached_tokens": cached}
        key = TrajectoryId(3, 0, 0)
        made.note(TurnCompleted(id=key, turn=turn, row=0, segments=(action,), at_s=1.0, **counts))
    row = made.row(CLOCK, outcome())
    assert (row.context_tokens, row.cached_tokens) == (40, 12)
    assert tally().row(CLOCK, outcome()).cached_tokens is None, "not measured, as in a replay"


def test_rewards_lengths_and_parts_are_kept_for_each_kind_of_task() -> None:
    made = tally(sampled_version=2)
    for index, (kind, reward) in enumerate((("sum", 1.0), ("sum", 0.0), ("read", 0.5))):
        parts = {"format": reward / 2, "answer": reward / 2} if kind == "sum" else {}
        some = msgspec.structs.replace(trajectory(0, index, reward), reward_parts=parts)
        made.trajectory(some, kind=kind)
    made.trajectory(trajectory(1, 0, 9.0), kind="sum", counts=False)
    row = made.row(CLOCK, outcome())
    assert row.policy_version == 2, "the version that sampled, not the one that learns"
    assert (row.by_kind["sum"].trajectories, row.by_kind["sum"].reward_mean) == (2, 0.5)
    assert row.by_kind["read"].reward_mean == 0.5 and row.by_kind["read"].reward_parts == {}
    assert row.by_kind["sum"].reward_parts == row.reward_parts == {"format": 0.25, "answer": 0.25}
    assert row.reward_quantiles == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert row.end_reasons == {"answered": 4} and row.entropy == 1.0 and row.response_tokens_max == 2
    assert flat_row(row)["by_kind/sum/reward_parts/format"] == 0.25


def test_scores_of_another_length_than_the_turn_are_an_error() -> None:
    made, key = tally(), TrajectoryId(3, 0, 0)
    action = Segment(role=Role.ACTION, token_ids=(1, 2), logprobs=(-1.0, -1.0), policy_versions=(3, 3))
    made.note(TurnCompleted(id=key, turn=0, row=0, segments=(action,), at_s=1.0))
    with pytest.raises(ValueError, match="shorter"):
        made.note(TurnScored(id=key, turn=0, teacher_logprobs=(-1.0,), at_s=1.0))
    with pytest.raises(KeyError):
        made.note(TurnScored(id=key, turn=1, teacher_logprobs=(-1.0,), at_s=1.0))
