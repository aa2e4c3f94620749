"""Recorded updates made up at random, in memory and on disk."""

from __future__ import annotations

import random

from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import TrajectoryRecord, TrajectoryWriter
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

START_S = 1000.0


def trajectory_events(
    rng: random.Random, identity: TrajectoryId, *, vocabulary: int = 40, reward: float = 0.0, scored: bool = False
) -> list[Event]:
    """What a live trajectory of one to three turns says, the teacher's scores of `scored` ones included."""
    prompt_rng = random.Random(f"prompt {identity.group}")
    segments = [Segment(role=Role.PROMPT, token_ids=_tokens(prompt_rng, vocabulary, 4))]
    at = START_S + rng.uniform(0.0, 0.1)
    started_s, fixed, events = at, 0, list[Event]()
    for turn in range(rng.randint(1, 3)):
        if turn:
            segments.append(Segment(role=Role.OBSERVATION, token_ids=_tokens(rng, vocabulary, 3)))
        ids = _tokens(rng, vocabulary, 5)
        logprobs = tuple(rng.uniform(-5.0, -2.5) for _ in ids)
        versions = (identity.update,) * len(ids)
        segments.append(Segment(role=Role.ACTION, token_ids=ids, logprobs=logprobs, policy_versions=versions))
        at += rng.uniform(0.05, 0.5)
        events.append(TurnCompleted(id=identity, turn=turn, row=0, segments=tuple(segments[fixed:]), at_s=at))
        fixed = len(segments)
        if scored:
            scores = tuple(rng.uniform(-5.0, -1.0) for _ in ids)
            events.append(TurnScored(id=identity, turn=turn, teacher_logprobs=scores, at_s=at + rng.uniform(0.0, 0.4)))
    trajectory = Trajectory(
        id=identity,
        task_id=f"task-{identity.group}",
        rows=(Row(segments=tuple(segments)),),
        end_reason=EndReason.ANSWERED,
        started_s=started_s,
        completed_s=at,
        turns=turn + 1,
    )
    events.append(TrajectoryCompleted(trajectory=trajectory, at_s=at))
    events = sorted(events, key=lambda event: event.at_s)
    return [*events, Rewarded(id=identity, reward=reward, verifier_s=0.02, at_s=at + 0.02)]


def write_update(folder: RunFolder, update: int, *, groups: int, size: int, seed: int = 0, **more: object) -> None:
    """One recorded update; rewards alternate, so that every group holds both values, but for the groups in `equal`.
    `lost` names (group, index)."""
    lost, equal = more.pop("lost", ()), more.pop("equal", ())
    rng, writer = random.Random(f"{seed}/{update}"), TrajectoryWriter(folder, lambda ids: "")
    for b in range(groups):
        for i in range(size):
            identity = TrajectoryId(update, b, i)
            if (b, i) in lost:  # type: ignore[operator]
                writer.note(TrajectoryLost(id=identity, reason="the server died", at_s=START_S + 0.2))
                continue
            reward = 1.0 if b in equal else float((b + i) % 2)  # type: ignore[operator]
            for event in trajectory_events(rng, identity, reward=reward, **more):  # type: ignore[arg-type]
                writer.note(event)
    writer.end_update(update)()


def record_of(events: list[Event], folder: RunFolder) -> TrajectoryRecord:
    """One trajectory's record, by way of the file."""
    from megathunder.metrics.trajectories import read_trajectories

    writer = TrajectoryWriter(folder, lambda ids: "")
    for event in events:
        writer.note(event)
    return next(read_trajectories(writer.end_update(0)()))


def _tokens(rng: random.Random, vocabulary: int, most: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary) for _ in range(rng.randint(2, most)))
