"""A replay says what the live run said, in the same order, at the times it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation, Recording
from benchmarks.comparison.replayed_rollouts import ReplayedSupply, Timing, events_of, feed, read_recorded, timings
from megathunder.config import Config
from megathunder.coordinator.rollouts import Rollouts
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.types import (
    Rewarded,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)
from tests.unit.coordinator.recordings import START_S, record_of, trajectory_events, write_update


def recorded(path: Path, **options: object) -> list:
    folder = RunFolder(path)
    write_update(folder, 0, groups=3, size=4, **options)  # type: ignore[arg-type]
    return read_recorded(path)[0]


def completions(update: list, every: list[list[Timing]]) -> dict[tuple[int, int], float]:
    found = {}
    for b, group in enumerate(update):
        for i, record in enumerate(group):
            for event in events_of(record, TrajectoryId(0, b, i), 0, every[b][i]):
                if isinstance(event, TrajectoryCompleted):
                    found[b, i] = event.at_s
    return found


def test_a_replayed_trajectory_says_what_the_live_one_said(tmp_path: Path) -> None:
    live = trajectory_events(random.Random(1), TrajectoryId(0, 0, 0), reward=1.0, scored=True)
    record = record_of(live, RunFolder(tmp_path))
    again = events_of(record, TrajectoryId(0, 0, 0), 0, Timing(start_s=START_S))
    assert [type(e) for e in again] == [type(e) for e in sorted(live, key=lambda e: e.at_s)]
    for kind, fields in ((TurnCompleted, ("turn", "row", "segments")), (TurnScored, ("turn", "teacher_logprobs"))):
        ours, theirs = ([e for e in es if isinstance(e, kind)] for es in (again, live))
        assert [[getattr(e, f) for f in fields] for e in ours] == [[getattr(e, f) for f in fields] for e in theirs]
    assert [e.at_s for e in again] == pytest.approx([e.at_s - START_S for e in sorted(live, key=lambda e: e.at_s)])


def test_tokens_carry_the_version_they_are_replayed_under(tmp_path: Path) -> None:
    update = recorded(tmp_path)
    for event in events_of(update[0][0], TrajectoryId(7, 0, 0), 9, Timing(start_s=START_S)):
        if isinstance(event, TrajectoryCompleted):
            assert {v for row in event.trajectory.rows for v in row.policy_versions} == {9}
            assert event.trajectory.id == TrajectoryId(7, 0, 0)
            assert event.trajectory.reward is None


def test_speed_and_verifier_move_times_and_nothing_else(tmp_path: Path) -> None:
    update = recorded(tmp_path)
    start_s = timings(update, Recording(run=""), None)[0][0].start_s
    plain = events_of(update[0][0], TrajectoryId(0, 0, 0), 0, Timing(start_s=start_s))
    fast = events_of(update[0][0], TrajectoryId(0, 0, 0), 0, Timing(start_s=start_s, speed=4.0, verifier_s=3.0))
    for one, other in zip(plain, fast, strict=True):
        late = 3.0 if isinstance(one, Rewarded) else 0.0
        assert other.at_s == pytest.approx(one.at_s / 4.0 + late)


def test_shuffling_exchanges_completion_times_and_keeps_each_trajectory_in_order(tmp_path: Path) -> None:
    update = recorded(tmp_path)
    plain = completions(update, timings(update, Recording(run=""), None))
    every = timings(update, Recording(run=""), random.Random("3/0"))
    shuffled = completions(update, every)
    assert sorted(shuffled.values()) == pytest.approx(sorted(plain.values()))
    assert max(abs(shuffled[key] - plain[key]) for key in plain) > 0.05, "the order has changed"
    for b, group in enumerate(update):
        for i, record in enumerate(group):
            events = events_of(record, TrajectoryId(0, b, i), 0, every[b][i])
            assert [e.at_s for e in events] == sorted(e.at_s for e in events)
            assert [e.turn for e in events if isinstance(e, TurnCompleted)] == list(range(len(record.turns)))


def test_a_lost_trajectory_is_lost_again(tmp_path: Path) -> None:
    update = recorded(tmp_path, lost=((1, 2),))
    (event,) = events_of(update[1][2], TrajectoryId(0, 1, 2), 0, Timing(start_s=START_S))
    assert isinstance(event, TrajectoryLost) and event.reason == "the server died"


def test_events_arrive_in_order_and_not_before_their_time(tmp_path: Path) -> None:
    update = recorded(tmp_path)

    async def run() -> list[tuple[float, float]]:
        rollouts = Rollouts(update=0, batch=0, policy_version=0, groups=[[]])
        every = timings(update, Recording(run="", speed=4.0), None)
        events = [e for b, g in enumerate(update) for i, r in enumerate(g)
                  for e in events_of(r, TrajectoryId(0, b, i), 0, every[b][i])]  # fmt: skip
        due = sorted(e.at_s for e in events)
        await feed(rollouts, events)
        got = [rollouts.inbox.get_nowait().at_s - rollouts.started_s for _ in events]
        return list(zip(due, got, strict=True))

    pairs = asyncio.run(run())
    assert all(got >= due for due, got in pairs)
    assert [got for _, got in pairs] == sorted(got for _, got in pairs)


def test_every_schedule_accepts_a_replay(tmp_path: Path) -> None:
    update = recorded(tmp_path)
    for schedule in ("sync", "periodic_async", "thundersync", "one_step_off"):
        config = dataclasses.replace(Config(), schedule=schedule)
        scheduler = UpdateScheduler(config, 5, 5, [len(g) for g in update])
        every = timings(update, Recording(run=""), random.Random(schedule))
        events = [e for b, g in enumerate(update) for i, r in enumerate(g)
                  for e in events_of(r, TrajectoryId(5, b, i), 5, every[b][i])]  # fmt: skip
        for event in sorted(events, key=lambda e: e.at_s):
            scheduler.on_event(event, event.at_s)
        assert scheduler.report.policy_lag_max == 0
        assert scheduler.next_work(0, 99.0) is not None


def test_further_recorded_groups_replace_those_an_update_begins_with(tmp_path: Path) -> None:
    update = recorded(tmp_path)
    run = dataclasses.replace(Config().run, groups_per_update=2)
    config = dataclasses.replace(Config(), run=run)
    supply = ReplayedSupply(config, AlternatingUpdates(config, Alternation()), Recording(run=""), [update])
    assert [len(group) for group in supply.groups(0)] == [4, 4]
    another = supply.replacement_group(0, 2)
    assert another is not None and another[0].id == "task-2"
    assert supply.replacement_group(0, 3) is None

    async def run_one() -> set[int]:
        past = time.monotonic() - 9
        rollouts = Rollouts(update=0, batch=0, policy_version=0, groups=supply.groups(0), started_s=past)
        rollouts.add_group(another, supply.collect)
        await rollouts.ended()
        return {m.id.group for m in await rollouts.messages(1.0) if isinstance(m, Rewarded)}

    assert asyncio.run(run_one()) == {2}, "only the group that was added is fed"


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds nothing"):
        read_recorded(tmp_path)
    recorded(tmp_path)
    with pytest.raises(UserError, match="no update 4"):
        read_recorded(tmp_path, (0, 4))


def test_trajectories_of_a_replay_can_be_replayed(tmp_path: Path) -> None:
    update = recorded(tmp_path / "a")
    every = timings(update, Recording(run=""), None)
    replayed = events_of(update[0][0], TrajectoryId(0, 0, 0), 0, every[0][0])
    again = record_of(replayed, RunFolder(tmp_path / "b"))
    assert again.trajectory is not None and update[0][0].trajectory is not None
    assert msgspec.structs.replace(again.trajectory, reward=None).rows == update[0][0].trajectory.rows
    assert again.reward == update[0][0].reward
