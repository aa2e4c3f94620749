"""Every schedule, release, arrival order and assignment to cells adds up to the gradient of the naive barrier loss."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from fake_learner import divergence, h, row_gradient, trajectory_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.advantages import batch_deviation, by_group, group_advantages, separate_advantages
from own_advantage import hashed
from update_driver import computed, drive, grpo_events, interleave, make_trajectory, score_events, teacher, turn_events

from megathunder.accumulator_keys import BATCH
from megathunder.config.learner import LearnerConfig
from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.config.root import Config
from megathunder.config.run import RunConfig
from megathunder.config.salt import SaltConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.objectives.advantage import BUILT_IN
from megathunder.objectives.overlong import overlong_penalty
from megathunder.schedule.lifecycle import State
from megathunder.schedule.token_chain import train_rows
from megathunder.types import ContributionId, Rewarded, TrajectoryCompleted, TrajectoryLost

REWARDS = st.sampled_from([0.0, 1.0, 0.0, 1.0, 0.25, 0.7, None])
OWN = f"{Path(__file__).parent / 'own_advantage.py'}:hashed"
ADVANTAGES = (*sorted(set(BUILT_IN) - {"gdpo"}), OWN)
SCHEDULES = ("sync", "periodic_async", "thundersync", "one_step_off")


def check_settled(outcome, config: Config) -> None:
    """Laws that hold after every update."""
    scheduler = outcome.scheduler
    assert scheduler.finished and all(c.clean for c in outcome.cells)
    report = scheduler.report
    assert report.computed_tokens == sum(map(computed, outcome.commands)) and 0 <= report.wasted_share <= 1
    assert all(c.peak_groups <= config.streaming.max_open_groups for c in outcome.cells)
    size = sum(abs(row_gradient(row)) for c in outcome.differentiations for row in c.rows)
    assert report.loss_sum == pytest.approx(outcome.gradient, abs=1e-9 * (1 + 10 * size)), "whatever came first"
    scheduler.on_step(True)
    assert scheduler.ledger.counts.balanced and scheduler.ledger.counts.open == 0


def applied_tokens(outcome, trajectories) -> int:
    """Sampled tokens of those (GRPO) that are in the step."""
    state = outcome.scheduler.ledger.state
    return sum(t.sampled_tokens for t in trajectories if state(ContributionId(*t.id)) is State.APPLIED)


@given(
    rewards=st.lists(st.lists(REWARDS, min_size=2, max_size=5), min_size=1, max_size=4),
    schedule=st.sampled_from(SCHEDULES),
    release=st.sampled_from(["trajectory", "turn_forward"]),
    content_ready=st.booleans(),
    advantage=st.sampled_from(ADVANTAGES),
    loss=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    exact=st.booleans(),
    on_lost=st.sampled_from(["shrink", "drop_group"]),
    cap=st.integers(1, 3),
    pack_tokens=st.sampled_from([1, 12, 64]),
    cells=st.integers(1, 3),
    apart=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=250, deadline=None)
def test_grpo_gradient_equals_the_barrier_gradient(
    rewards, schedule, release, content_ready, advantage, loss, exact, on_lost, cap, pack_tokens, cells, apart, seed
) -> None:
    rng = random.Random(seed)
    config = Config(
        schedule=schedule,
        run=RunConfig(group_size=5),
        grpo=GrpoConfig(advantage=advantage, pass_k=1 + seed % 3),
        salt=SaltConfig(measure=apart),
        loss=LossConfig(normalisation=loss, constant=7.0),
        learner=LearnerConfig(accumulator="exact" if exact else "fp32"),
        streaming=StreamingConfig(
            release=release,
            content_ready=content_ready,
            on_lost=on_lost,
            max_open_groups=cap,
            max_per_trajectory_accumulators=2,
            pack_tokens=pack_tokens,
        ),
    )
    groups = [
        [(make_trajectory(g, i, [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]), r) for i, r in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    events = interleave([grpo_events(t, r, lost_late=rng.random() < 0.5) for group in groups for t, r in group], rng)
    outcome = drive(config, [len(g) for g in groups], events, cells=cells, seed=seed)

    def rule(rewards: list[float]) -> list[float]:
        return hashed(rewards) if advantage == OWN else group_advantages(rewards, advantage, k=1 + seed % 3)

    expected, weights, z, scale_sum = [], [], 0.0, 0.0
    for group in groups:
        if on_lost == "drop_group" and any(r is None for _, r in group):
            continue
        got = by_group([r for _, r in group], [len(group)], rule)
        for (trajectory, reward), a in zip(group, got, strict=True):
            if reward is not None:
                length = trajectory.sampled_tokens
                z += {"token_mean": length, "sequence_mean": 1, "constant": 0}[loss]
                weights.append(a)
                part = a * trajectory_gradient(trajectory) / (length if loss == "sequence_mean" else 1)
                expected.append(part)
                scale_sum += abs(part)
    assert outcome.gradient == pytest.approx(math.fsum(expected), abs=1e-9 * (1 + scale_sum))
    z = 7.0 if loss == "constant" else z
    over = batch_deviation(weights) + 1e-6 if BUILT_IN.get(advantage, BUILT_IN["std"]).over_batch else 1.0
    assert outcome.scheduler.normaliser == pytest.approx(z * over, rel=1e-12)
    assert outcome.scheduler.skip == (outcome.scheduler.ledger.counts.folded == 0 or z == 0)
    check_settled(outcome, config)
    assert outcome.scheduler.report.trained_tokens == applied_tokens(outcome, [t for g in groups for t, _ in g])


@given(
    rewards=st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=6),
        min_size=1,
        max_size=3,
    ),
    schedule=st.sampled_from(SCHEDULES),
    reward_values=st.integers(0, 6),
    content_ready=st.booleans(),
    exact=st.booleans(),
    penalty=st.booleans(),
    cells=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=120, deadline=None)
def test_several_rewards_each_normalised_in_its_group_equal_the_barrier(
    rewards, schedule, reward_values, content_ready, exact, penalty, cells, seed
) -> None:
    """GDPO: classes of reward vectors, beyond them one moment more per reward, the batch's deviation at the barrier."""
    rng = random.Random(seed)
    config = Config(
        schedule=schedule,
        run=RunConfig(group_size=6),
        rollout=RolloutConfig(max_tokens=12, max_new_tokens=2),
        grpo=GrpoConfig(advantage="gdpo", overlong_buffer_tokens=8 * penalty),
        learner=LearnerConfig(accumulator="exact" if exact else "fp32"),
        streaming=StreamingConfig(reward_values=reward_values, content_ready=content_ready),
    )
    groups = [
        [(make_trajectory(g, i, [rng.randint(1, 3)]), pair) for i, pair in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    streams = [
        [*turn_events(t), TrajectoryCompleted(trajectory=t, at_s=0), rewarded_in_parts(t, pair)]
        for group in groups
        for t, pair in group
    ]
    outcome = drive(config, [len(g) for g in groups], interleave(streams, rng), cells=cells, seed=seed)
    expected, weights = [], []
    for group in groups:
        rows = [(*pair, overlong_penalty(len(t.rows[0].token_ids), 12, 8)) if penalty else pair for t, pair in group]
        got = separate_advantages(rows)
        weights += got
        expected += [a * trajectory_gradient(t) for a, (t, _) in zip(got, group, strict=True)]
    assert outcome.gradient == pytest.approx(math.fsum(expected), abs=1e-8)
    z = sum(t.sampled_tokens for g in groups for t, _ in g)
    assert outcome.scheduler.normaliser == pytest.approx(z * (batch_deviation(weights) + 1e-6), rel=1e-12)
    moments = [c for c in outcome.differentiations if c.features]
    assert all(len(c.features) == 3 + penalty for c in moments)
    check_settled(outcome, config)


def rewarded_in_parts(trajectory, pair) -> Rewarded:
    parts = dict(zip(("correct", "short"), pair, strict=True))
    return Rewarded(id=trajectory.id, reward=sum(pair), verifier_s=0, at_s=0, parts=parts)


@given(
    shape=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=1, max_size=6),
    lost=st.sets(st.integers(0, 5)),
    restarted=st.sets(st.integers(0, 5)),
    schedule=st.sampled_from(SCHEDULES),
    release=st.sampled_from(["trajectory", "turn", "turn_forward"]),
    pack_tokens=st.sampled_from([1, 12, 64]),
    cells=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=250, deadline=None)
def test_opd_gradient_equals_the_barrier_gradient(
    shape, lost, restarted, schedule, release, pack_tokens, cells, seed
) -> None:
    rng = random.Random(seed)
    streaming = StreamingConfig(release=release, pack_tokens=pack_tokens)
    config = Config(objective="opd", schedule=schedule, streaming=streaming)
    streams, expected = [], []
    for index, rows in enumerate(shape):
        trajectory = make_trajectory(0, index, rows)
        stream = []
        if index in restarted:  # an earlier run that failed after its first turn was scored
            failed = make_trajectory(0, index, [2], salt=1)
            stream += [*turn_events(failed)[:1], *score_events(failed)[:1], *turn_events(failed)[1:]]
            expected.append(opd_gradient(turn_events(failed)[:1]))
        turns, scores = turn_events(trajectory), score_events(trajectory)
        if index in lost:
            keep = rng.randint(0, len(turns))
            stream += interleave_scores(turns, scores[:keep], [], rng)
            stream.append(TrajectoryLost(id=trajectory.id, reason="server", at_s=0))
            expected.append(opd_gradient(turns[:keep]))
        else:
            stream += interleave_scores(turns, scores, [TrajectoryCompleted(trajectory=trajectory, at_s=0)], rng)
            expected.append(opd_gradient(turns))
        streams.append(stream)
    outcome = drive(config, [len(shape)], interleave(streams, rng), cells=cells, seed=seed)
    assert outcome.gradient == pytest.approx(math.fsum(expected), abs=1e-9)
    trained = sum(len(c.trained) for c in outcome.cells)
    assert outcome.scheduler.normaliser == trained
    check_settled(outcome, config)
    assert outcome.scheduler.report.trained_tokens == trained


def interleave_scores(turns, scores, completed, rng):
    """Scores come after their turn, in any order otherwise, also after the trajectory has completed."""
    stream = [*turns, *completed]
    for score in scores:
        earliest = next(i for i, e in enumerate(stream) if getattr(e, "turn", -1) == score.turn) + 1
        stream.insert(rng.randint(earliest, len(stream)), score)
    return stream


def opd_gradient(turns) -> float:
    return math.fsum(
        (p - teacher(t)) * h(t)
        for e in turns
        for t, p in zip(e.segments[-1].token_ids, e.segments[-1].logprobs, strict=True)
    )


@given(
    rewards=st.lists(st.lists(REWARDS, min_size=2, max_size=4), min_size=1, max_size=3), seed=st.integers(0, 1 << 30)
)
@settings(max_examples=60, deadline=None)
def test_exact_sums_are_the_same_number_under_every_schedule_order_and_assignment(rewards, seed) -> None:
    sums = set()
    for schedule, ready, cells in itertools.product(("sync", "periodic_async", "thundersync"), (False, True), (1, 2)):
        rng = random.Random(seed + cells + ready)
        config = Config(
            schedule=schedule,
            learner=LearnerConfig(accumulator="exact"),
            streaming=StreamingConfig(content_ready=ready, max_open_groups=2),
        )
        streams = [
            grpo_events(make_trajectory(g, i, [2]), r) for g, group in enumerate(rewards) for i, r in enumerate(group)
        ]
        sizes = [len(g) for g in rewards]
        outcome = drive(config, sizes, interleave(streams, rng), cells=cells, seed=rng.randint(0, 999), exact=True)
        sums.add(outcome.gradient)
    assert len(sums) == 1


@given(
    rewards=st.lists(st.lists(REWARDS, min_size=2, max_size=4), min_size=1, max_size=4),
    schedule=st.sampled_from(SCHEDULES),
    release=st.sampled_from(["trajectory", "turn_forward"]),
    content_ready=st.booleans(),
    exact=st.booleans(),
    cells=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=100, deadline=None)
def test_a_divergence_inside_the_reward_gives_the_barrier_gradient_of_the_shaped_rewards(
    rewards, schedule, release, content_ready, exact, cells, seed
) -> None:
    rng = random.Random(seed)
    config = Config(
        schedule=schedule,
        run=RunConfig(group_size=4),
        grpo=GrpoConfig(advantage="none", kl_coefficient=0.1, kl_in_reward=True),
        learner=LearnerConfig(accumulator="exact" if exact else "fp32"),
        streaming=StreamingConfig(release=release, content_ready=content_ready, max_open_groups=2),
    )
    groups = [
        [(make_trajectory(g, i, [rng.randint(1, 3) for _ in range(rng.randint(1, 2))]), r) for i, r in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    events = interleave([grpo_events(t, r, lost_late=rng.random() < 0.5) for group in groups for t, r in group], rng)
    outcome = drive(config, [len(g) for g in groups], events, cells=cells, seed=seed)
    expected = []
    for group in groups:
        shaped = [None if r is None else r - 0.1 * sum(map(divergence, train_rows(t, 1.0))) for t, r in group]
        weights = by_group(shaped, [len(group)], lambda rewards: group_advantages(rewards, "none"))
        expected += [w * trajectory_gradient(t) for w, (t, r) in zip(weights, group, strict=True) if r is not None]
    assert outcome.gradient == pytest.approx(math.fsum(expected), abs=1e-7)
    check_settled(outcome, config)


def test_worked_check_gives_the_same_gradient_in_all_120_arrival_orders() -> None:
    rewards, gradients = [1, 0, 0, 1, 1], [2, -1, 3, 0.5, -2]
    config = Config(
        grpo=GrpoConfig(advantage="sample_std", epsilon=1e-6), loss=LossConfig(normalisation="constant", constant=5)
    )
    trajectories = [make_trajectory(0, i, [1], action=1) for i in range(5)]
    weight = {
        t.rows[0].token_ids[-1]: g / h(t.rows[0].token_ids[-1]) for t, g in zip(trajectories, gradients, strict=True)
    }
    for order in itertools.permutations(range(5)):
        events = [e for i in order for e in grpo_events(trajectories[i], rewards[i])]
        outcome = drive(config, [5], events, seed=hash(order))
        total = 0.0
        held: dict = {}
        for command in outcome.commands:  # the fake's arithmetic with the gradients of the worked check
            if hasattr(command, "rows"):
                for row in command.rows:
                    token = row.token_ids[-1]
                    held[command.target] = held.get(command.target, 0) + row.scale * weight[token] * h(token)
            else:
                for term in command.terms:
                    held[BATCH] = held.get(BATCH, 0) + term.coefficient * held[term.source]
        total = held[BATCH]
        # g are gradients of +s here, the loss is minimised: the sign turns.
        assert -total / outcome.scheduler.normaliser == pytest.approx(0.365148, abs=1e-6)


def test_equal_rewards_known_in_time_cost_no_learner_work_and_the_batch_takes_no_step() -> None:
    for schedule in ("sync", "periodic_async"):
        config = Config(schedule=schedule)
        events = [e for g in range(4) for i in range(3) for e in grpo_events(make_trajectory(g, i, [2]), 1.0)]
        outcome = drive(config, [3] * 4, events)
        assert outcome.commands == [] and outcome.scheduler.skip
        assert outcome.scheduler.report.groups_zero_advantage == 4
        assert outcome.scheduler.ledger.counts.dropped_by_reason == {"equal_rewards": 12}


@pytest.mark.parametrize("objective", ["grpo", "opd"])
def test_a_step_that_was_refused_trained_no_token_and_wasted_all_work(objective: str) -> None:
    trajectories = [make_trajectory(0, i, [2]) for i in range(3)]
    events = [e for t, r in zip(trajectories, [1.0, 0.0, 1.0], strict=True) for e in grpo_events(t, r)]
    if objective == "opd":
        complete = [TrajectoryCompleted(trajectory=t, at_s=0) for t in trajectories]
        events = [e for t in trajectories for e in (*turn_events(t), *score_events(t))] + complete
    for stepped, trained, wasted in ((True, 12, 0.0), (False, 0, 1.0)):
        scheduler = drive(Config(objective=objective), [3], events).scheduler
        scheduler.on_step(stepped)
        assert (scheduler.report.trained_tokens, scheduler.report.wasted_share) == (trained, wasted)


def test_infrastructure_failure_leaves_statistics_to_the_survivors() -> None:
    config = replace(Config(), grpo=GrpoConfig(advantage="none"))
    trajectories = [make_trajectory(0, i, [1]) for i in range(4)]
    events = [e for t, r in zip(trajectories, [1, 0, None, 1], strict=True) for e in grpo_events(t, r)]
    outcome = drive(config, [4], events)
    weights = {0: 1 / 3, 1: -2 / 3, 3: 1 / 3}
    assert outcome.gradient == pytest.approx(sum(w * trajectory_gradient(trajectories[i]) for i, w in weights.items()))
    assert outcome.scheduler.ledger.state(events[-1].id and (0, 0, 2, -1)) is State.DROPPED


def test_a_reward_that_lands_before_or_with_its_trajectory_counts_once() -> None:
    config = Config(grpo=GrpoConfig(advantage="none"))
    import msgspec

    first, second = make_trajectory(0, 0, [1]), make_trajectory(0, 1, [1])
    reward = Rewarded(id=first.id, reward=1.0, verifier_s=0, at_s=0)
    with_reward = TrajectoryCompleted(trajectory=msgspec.structs.replace(second, reward=0.0), at_s=0)
    events = [reward, TrajectoryCompleted(trajectory=first, at_s=0), reward, with_reward]
    outcome = drive(config, [2], events)
    assert outcome.gradient == pytest.approx(0.5 * trajectory_gradient(first) - 0.5 * trajectory_gradient(second))
