"""Every trajectory of a run on disk, with all that a replay needs: exact tokens, log-probabilities, rewards, times.

    writer.note(event)            every rollout event, in any order and of any update
    writer.end_update(update)()   writes trajectories/update_00001.jsonl, one `TrajectoryRecord` per line

Read by replay and simulation. Times are `time.monotonic` seconds of the run's host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from megathunder.jsonl import decoded_lines, encode_lines
from megathunder.metrics.run_folder import RunFolder, write_atomically
from megathunder.types import (
    Event,
    Rewarded,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)

Decode = Callable[[tuple[int, ...]], str]


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """When a turn was fixed and scored, and what the teacher said of its T sampled tokens ([T], empty without one)."""

    turn: int
    completed_s: float
    scored_s: float | None = None
    teacher_logprobs: tuple[float, ...] = ()


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt. `trajectory` is None where it was lost before it was complete; `text` is one string a row."""

    id: TrajectoryId
    trajectory: Trajectory | None = None
    text: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    reward_parts: dict[str, float] = {}
    rewarded_s: float | None = None
    verifier_s: float = 0.0
    lost: str = ""


class TrajectoryWriter:
    """Collects events by trajectory; `decode` turns token ids into text for people to read."""

    def __init__(self, folder: RunFolder, decode: Decode) -> None:
        self._folder, self._decode = folder, decode
        self._open: dict[TrajectoryId, TrajectoryRecord] = {}
        folder.trajectories.mkdir(parents=True, exist_ok=True)

    def note(self, event: Event) -> None:
        """Add one event to its trajectory. A trajectory that runs again starts anew with its turn 0."""
        key = event.trajectory.id if isinstance(event, TrajectoryCompleted) else event.id
        record = self._open.get(key) or TrajectoryRecord(id=key)
        self._open[key] = _with(record, event)

    def end_update(self, update: int) -> Callable[[], Path]:
        """Forget the trajectories of `update`; the call that writes them, in the order of their groups. It may be made
        in another thread: it decodes and encodes every token."""
        mine = sorted(key for key in self._open if key.update == update)
        records = [self._open.pop(key) for key in mine]

        def write() -> Path:
            path = self._folder.trajectories_of(update)
            write_atomically(path, encode_lines(map(self._with_text, records)))
            return path

        return write

    def _with_text(self, record: TrajectoryRecord) -> TrajectoryRecord:
        rows = record.trajectory.rows if record.trajectory else ()
        return msgspec.structs.replace(record, text=tuple(self._decode(row.token_ids) for row in rows))


def read_trajectories(path: Path) -> Iterator[TrajectoryRecord]:
    """The records of one update's file."""
    return (record for _, record in decoded_lines(path, msgspec.json.Decoder(TrajectoryRecord)))


def _with(record: TrajectoryRecord, event: Event) -> TrajectoryRecord:
    replace = msgspec.structs.replace
    match event:
        case TurnCompleted():
            earlier = tuple(turn for turn in record.turns if turn.turn < event.turn)
            return replace(record, turns=(*earlier, Turn(turn=event.turn, completed_s=event.at_s)))
        case TurnScored():
            scored = {"scored_s": event.at_s, "teacher_logprobs": event.teacher_logprobs}
            return replace(
                record, turns=tuple(replace(t, **scored) if t.turn == event.turn else t for t in record.turns)
            )
        case TrajectoryCompleted():
            known = event.trajectory.reward
            return replace(record, trajectory=event.trajectory, reward=record.reward if known is None else known)
        case Rewarded():
            return replace(
                record,
                reward=event.reward,
                reward_parts=event.parts,
                rewarded_s=event.at_s,
                verifier_s=event.verifier_s,
            )
        case TrajectoryLost():
            return replace(record, lost=event.reason)
