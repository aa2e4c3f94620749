"""Trajectories of a recorded run, fed to the scheduler in the place of engines, sandboxes and teachers.

    release time = (recorded time - first request of its update) / speed   (+ verifier_s for rewards)
    shuffled     = trajectory i takes the pace of trajectory p(i): all its times by t_p(i) / t_i, t the completion

Tokens carry the version of the update they are replayed in: they count as sampled by the policy at hand, whichever
made them. Of a lost trajectory only its loss is replayed. Called by `assembly.py`.
Refuses (UserError) a folder without recorded trajectories and updates that were not recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from benchmarks.comparison.alternation import AlternatingUpdates, Recording
from megathunder import tracing
from megathunder.config import Config
from megathunder.coordinator.rollouts import Rollouts
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import TrajectoryRecord, read_trajectories
from megathunder.rollout.group_size.sagc import prompts_for
from megathunder.tasks.task import ExactAnswer, Task
from megathunder.types import (
    Event,
    Rewarded,
    Role,
    Row,
    Segment,
    ServerAddress,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)

Recorded = list[list[TrajectoryRecord]]
"""One update: its groups, each in the order of its trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How recorded times become release times, in seconds from the start of the replayed update."""

    start_s: float
    speed: float = 1.0
    pace: float = 1.0
    verifier_s: float = 0.0

    def at(self, recorded_s: float) -> float:
        return max(recorded_s - self.start_s, 0.0) * self.pace / self.speed


def read_recorded(run: Path, updates: Sequence[int] = ()) -> list[Recorded]:
    """The recorded updates of a run, all of them or those named; UserError as in the module docstring."""
    folder = RunFolder(run)
    files = {int(p.stem.removeprefix("update_")): p for p in sorted(folder.trajectories.glob("update_*.jsonl"))}
    missing = sorted(set(updates) - files.keys())
    if missing or not files:
        raise UserError(
            f"{folder.trajectories} holds {'no update ' + ', '.join(map(str, missing)) if files else 'nothing'}",
            expected="trajectories/update_*.jsonl of a run that has taken these updates",
            remedy="run with metrics.trajectories = true, or name other updates",
        )
    return [_groups(files[update]) for update in (updates or sorted(files))]


def _groups(file: Path) -> Recorded:
    records = sorted(read_trajectories(file), key=lambda record: record.id)
    return [list(group) for _, group in itertools.groupby(records, key=lambda record: record.id.group)]


def timings(recorded: Recorded, settings: Recording, shuffle: random.Random | None) -> list[list[Timing]]:
    """The timing of every trajectory of an update."""
    records = [record for group in recorded for record in group]
    start_s = min((r.trajectory.started_s for r in records if r.trajectory), default=0.0)
    completed = [r.trajectory.completed_s - start_s if r.trajectory else 0.0 for r in records]
    order = [i for i, t in enumerate(completed) if t > 0]
    target = list(order)
    if shuffle:
        shuffle.shuffle(target)
    paces = {i: completed[j] / completed[i] for i, j in zip(order, target, strict=True)}
    every = iter(
        Timing(start_s=start_s, speed=settings.speed, pace=paces.get(i, 1.0), verifier_s=settings.verifier_s)
        for i in range(len(records))
    )
    return [[next(every) for _ in group] for group in recorded]


def events_of(record: TrajectoryRecord, identity: TrajectoryId, version: int, timing: Timing) -> list[Event]:
    """The events of one trajectory in order of time; `at_s` counts from the start of the update."""
    if record.trajectory is None or record.lost:
        at = timing.at(max((turn.completed_s for turn in record.turns), default=timing.start_s))
        return [TrajectoryLost(id=identity, reason=record.lost or "recorded as lost", at_s=at)]
    trajectory = _renewed(record.trajectory, identity, version, timing)
    end = trajectory.completed_s
    times = {turn.turn: turn for turn in record.turns}
    events: list[Event] = []
    for number, (row, segments) in enumerate(_turns(trajectory)):
        known = times.get(number)
        at = min(timing.at(known.completed_s), end) if known else end
        events.append(TurnCompleted(id=identity, turn=number, row=row, segments=segments, at_s=at))
        if known and known.scored_s is not None:
            scored = max(timing.at(known.scored_s), at)
            events.append(TurnScored(id=identity, turn=number, teacher_logprobs=known.teacher_logprobs, at_s=scored))
    events.append(TrajectoryCompleted(trajectory=trajectory, at_s=end))
    if record.reward is not None:
        waited = timing.at(record.rewarded_s) - end if record.rewarded_s is not None else 0.0
        took = max(waited, 0.0) + timing.verifier_s
        events.append(
            Rewarded(id=identity, reward=record.reward, verifier_s=took, at_s=end + took, parts=record.reward_parts)
        )
    return sorted(events, key=lambda event: event.at_s)  # stable: causes stay before effects at equal times


def _renewed(trajectory: Trajectory, identity: TrajectoryId, version: int, timing: Timing) -> Trajectory:
    """The trajectory under its new name, version and times, its reward still to come."""

    def segment(old: Segment) -> Segment:
        return replace(old, policy_versions=(version,) * len(old.token_ids)) if old.role is Role.ACTION else old

    return replace(
        trajectory,
        id=identity,
        rows=tuple(Row(segments=tuple(segment(s) for s in row.segments)) for row in trajectory.rows),
        started_s=timing.at(trajectory.started_s),
        completed_s=timing.at(trajectory.completed_s),
        reward=None,
        rewarded_s=0.0,
    )


def _turns(trajectory: Trajectory) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """(row, new segments ending in the ACTION) of every turn."""
    for number, row in enumerate(trajectory.rows):
        pending: list[Segment] = []
        for segment in row.segments:
            pending.append(segment)
            if segment.role is Role.ACTION:
                yield number, tuple(pending)
                pending = []


class NoServers:
    """A replay publishes to nobody."""

    ready: tuple[ServerAddress, ...] = ()
    servers: tuple[ServerAddress, ...] = ()

    def probe_now(self, server: ServerAddress) -> None:
        raise AssertionError(f"{server.name} is no server of this run")


class ReplayedSupply:
    """The `Supply` of a replay. A replacement group is the next recorded one beyond those an update begins with."""

    def __init__(
        self, config: Config, plan: AlternatingUpdates, recording: Recording, recorded: Sequence[Recorded]
    ) -> None:
        self._config, self._plan = config, plan
        self._recording, self._recorded = recording, recorded

    def groups(self, batch: int) -> list[list[Task]]:
        first = self._of(batch)[: self._begins_with(batch)]
        return [[_placeholder(record) for record in group] for group in first]

    def _begins_with(self, batch: int) -> int:
        """Groups that were not drawn to replace others."""
        target, recorded = self._config.trajectory_target, self._of(batch)
        if not target:
            return self._config.run.groups_per_update
        return prompts_for(target, len(recorded[0])) if self._config.grpo.dynamic_sampling else len(recorded)

    def replacement_group(self, batch: int, index: int) -> list[Task] | None:
        recorded = self._of(batch)
        return [_placeholder(record) for record in recorded[index]] if index < len(recorded) else None

    async def collect(self, rollouts: Rollouts, groups: range) -> None:
        """Emit the events of these groups at their times."""
        recorded = self._of(rollouts.batch)
        settings = self._recording
        if self._plan.variant(rollouts.update).without_verifier:
            settings = dataclasses.replace(settings, verifier_s=0.0)
        shuffle = random.Random(f"{settings.shuffle_seed}/{rollouts.update}") if settings.shuffle_seed else None
        every = timings(recorded, settings, shuffle)
        events: list[Event] = []
        for b in groups:
            for i, record in enumerate(recorded[b]):
                identity = TrajectoryId(rollouts.update, b, i)
                events += events_of(record, identity, rollouts.policy_version, every[b][i])
        await feed(rollouts, events)

    def heldout(self) -> list[list[Task]]:
        raise UserError(
            "an evaluation in a replay",
            expected="run.evaluate_every = 0: no engine samples held-out tasks",
            remedy="set run.evaluate_every = 0",
        )

    async def collect_rewards(self, rollouts: Rollouts, groups: range) -> None:
        self.heldout()

    def _of(self, batch: int) -> Recorded:
        return self._recorded[batch % len(self._recorded)]


async def feed(rollouts: Rollouts, events: list[Event]) -> None:
    """Put `events` into the inbox at their times from the start of `rollouts`; at once where that has passed."""
    begun: dict[TrajectoryId, float] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        wait_s = rollouts.started_s + event.at_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        now = time.monotonic()
        if isinstance(event, TrajectoryCompleted):
            event = replace(event, trajectory=_on_clock(event.trajectory, rollouts.started_s, now))
            begun[event.trajectory.id] = event.trajectory.started_s
        event = replace(event, at_s=now)
        _trace(event, rollouts, begun)
        rollouts.inbox.put_nowait(event)


def _on_clock(trajectory: Trajectory, start_s: float, now: float) -> Trajectory:
    return replace(trajectory, started_s=start_s + trajectory.started_s, completed_s=now)


def _trace(event: Event, rollouts: Rollouts, begun: dict[TrajectoryId, float]) -> None:
    """The spans that a live trajectory leaves, its verifier included; its turns are drawn as one."""
    identity = event.trajectory.id if isinstance(event, TrajectoryCompleted) else event.id
    lane = tracing.rollout_lane(sum(len(g) for g in rollouts.groups[: identity.group]) + identity.index)
    if isinstance(event, TrajectoryCompleted):
        tracing.record(lane, "turn", begun[identity], event.at_s)
    elif isinstance(event, Rewarded):
        tracing.record(lane, "verifier", event.at_s - event.verifier_s, event.at_s)
        tracing.record(lane, "trajectory", begun[identity], event.at_s)


def _placeholder(record: TrajectoryRecord) -> Task:
    """Stands for the task of a recorded trajectory, which nobody runs again."""
    name = record.trajectory.task_id if record.trajectory else "lost"
    return Task(id=name, kind="recorded", prompt="", files=(), grading=ExactAnswer(answer=""))
