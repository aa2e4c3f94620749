"""Traces: when every turn, completion, score and reward of an update came, and how many tokens each holds.

Recorded by a run (`tools/simulate.py predict` converts its files) or drawn here from a seed. `rollout_events` turns a
trace into the events that the schedule consumes. Times are seconds from the first rollout request of the update.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from megathunder.types import (
    EndReason,
    Event,
    Rewarded,
    Role,
    Row,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTrace:
    """One turn: tokens that precede its action since the last turn, action tokens, when fixed and when scored."""

    context_tokens: int
    action_tokens: int
    completed_s: float
    scored_s: float | None = None
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTrace:
    """One trajectory. `reward` None with `lost_s` set: the machinery failed it."""

    group: int
    index: int
    turns: tuple[TurnTrace, ...]
    completed_s: float
    reward: float | None = None
    rewarded_s: float | None = None
    lost_s: float | None = None

    @property
    def tokens(self) -> int:
        return sum(t.context_tokens + t.action_tokens for t in self.turns)

    def stretched(self, factor: float) -> AttemptTrace:
        """All times multiplied by `factor`."""

        def scaled(at: float | None) -> float | None:
            return None if at is None else at * factor

        return replace(
            self,
            turns=tuple(
                replace(t, completed_s=t.completed_s * factor, scored_s=scaled(t.scored_s)) for t in self.turns
            ),
            completed_s=self.completed_s * factor,
            rewarded_s=scaled(self.rewarded_s),
            lost_s=scaled(self.lost_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTrace:
    """All attempts of one update and the suffix (reduction, step, publication) that followed."""

    attempts: tuple[AttemptTrace, ...]
    suffix_s: float = 0.0

    @property
    def group_sizes(self) -> list[int]:
        sizes = [0] * (1 + max(a.group for a in self.attempts))
        for attempt in self.attempts:
            sizes[attempt.group] += 1
        return sizes

    @property
    def tokens(self) -> int:
        return sum(a.tokens for a in self.attempts)

    def stretched(self, factor: float) -> UpdateTrace:
        """The same rollouts, slower by `factor`."""
        return replace(self, attempts=tuple(a.stretched(factor) for a in self.attempts))

    @property
    def rollout_s(self) -> float:
        """The last reward, score or loss."""
        times = [t for a in self.attempts for t in (a.completed_s, a.rewarded_s, a.lost_s) if t is not None]
        return max([*times, *(t.scored_s for a in self.attempts for t in a.turns if t.scored_s is not None)])


def rollout_events(trace: UpdateTrace, *, policy_version: int = 0, update: int = 0) -> list[Event]:
    """The events of a trace in order of time; token ids are zeros, only lengths matter."""
    events: list[Event] = []
    for attempt in trace.attempts:
        events += _attempt_events(attempt, TrajectoryId(update, attempt.group, attempt.index), policy_version)
    return sorted(events, key=lambda e: e.at_s)  # stable: causes stay before effects at equal times


def _attempt_events(attempt: AttemptTrace, identity: TrajectoryId, version: int) -> list[Event]:
    events: list[Event] = []
    rows: dict[int, list[Segment]] = {}
    for number, turn in enumerate(attempt.turns):
        segments = _segments(turn, first=not rows.get(turn.row), version=version)
        rows.setdefault(turn.row, []).extend(segments)
        events.append(TurnCompleted(id=identity, turn=number, row=turn.row, segments=segments, at_s=turn.completed_s))
    if attempt.lost_s is None or attempt.lost_s > attempt.completed_s:
        trajectory = Trajectory(
            id=identity,
            task_id="",
            rows=tuple(Row(segments=tuple(s)) for _, s in sorted(rows.items())),
            end_reason=EndReason.ANSWERED,
            started_s=0.0,
            completed_s=attempt.completed_s,
            turns=len(attempt.turns),
        )
        events.append(TrajectoryCompleted(trajectory=trajectory, at_s=attempt.completed_s))
    for number, turn in enumerate(attempt.turns):
        if turn.scored_s is not None:
            scores = (0.0,) * turn.action_tokens
            events.append(TurnScored(id=identity, turn=number, teacher_logprobs=scores, at_s=turn.scored_s))
    if attempt.lost_s is not None:
        events.append(TrajectoryLost(id=identity, reason="recorded", at_s=attempt.lost_s))
    elif attempt.reward is not None:
        at = attempt.completed_s if attempt.rewarded_s is None else attempt.rewarded_s
        events.append(Rewarded(id=identity, reward=attempt.reward, verifier_s=at - attempt.completed_s, at_s=at))
    return events


def _segments(turn: TurnTrace, *, first: bool, version: int) -> tuple[Segment, ...]:
    action = Segment(
        role=Role.ACTION,
        token_ids=(0,) * turn.action_tokens,
        logprobs=(0.0,) * turn.action_tokens,
        policy_versions=(version,) * turn.action_tokens,
    )
    if not turn.context_tokens:
        return (action,)
    role = Role.PROMPT if first else Role.OBSERVATION
    return Segment(role=role, token_ids=(0,) * turn.context_tokens), action


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a drawn trace looks like.

    Durations are lognormal with log-deviation `spread`; at most `concurrency` trajectories run at once (0: all), the
    next starts when one ends, so the rollout comes in waves. Every turn takes an equal share of its trajectory's
    time.
    """

    groups: int
    group_size: int
    turns: int
    spread: float
    concurrency: int = 0
    context_tokens: int = 0
    action_tokens: int = 1
    success: float = 0.5
    verifier_s: float = 0.0
    teacher_s: float = 0.0
    median_s: float = 1.0


def draw_trace(workload: Workload, seed: int) -> UpdateTrace:
    """A random trace of `workload`; the same for the same seed."""
    rng = random.Random(seed)
    count = workload.groups * workload.group_size
    slots = [0.0] * (min(workload.concurrency, count) or count)
    attempts = []
    for number in range(count):
        slot = min(range(len(slots)), key=slots.__getitem__) if workload.concurrency else number
        start = slots[slot]
        duration = workload.median_s * math.exp(workload.spread * rng.gauss(0.0, 1.0))
        slots[slot] = start + duration
        attempts.append(_draw_attempt(workload, number, start, duration, float(rng.random() < workload.success)))
    return UpdateTrace(attempts=tuple(attempts))


def _draw_attempt(workload: Workload, number: int, start: float, duration: float, reward: float) -> AttemptTrace:
    turns = []
    for turn in range(workload.turns):
        at = min(start + duration * (turn + 1) / workload.turns, start + duration)
        turns.append(
            TurnTrace(
                context_tokens=workload.context_tokens,
                action_tokens=workload.action_tokens,
                completed_s=at,
                scored_s=at + workload.teacher_s,
            )
        )
    end = start + duration
    return AttemptTrace(
        group=number // workload.group_size,
        index=number % workload.group_size,
        turns=tuple(turns),
        completed_s=end,
        reward=reward,
        rewarded_s=end + workload.verifier_s,
    )
