"""Work that cells are doing: what each command covers, so that its answer can be booked."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.schedule.step_planner import WorkStep
from megathunder.types import BATCH, AccumulatorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """A Differentiate in flight: its chains, the accumulator they are added to, and the new tokens of each."""

    cell: int
    target: AccumulatorKey
    steps: tuple[tuple[Chain, WorkStep], ...]
    tokens: tuple[int, ...]

    @property
    def group(self) -> Group | None:
        """Whose accumulators it touches."""
        return None if self.target == BATCH else self.steps[0][0].attempt.group


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldItem:
    """A Fold in flight. `closing` empties the group; otherwise `landed` attempts move from their own accumulators."""

    cell: int
    group: Group
    closing: bool
    landed: tuple[tuple[TrajectoryState, AccumulatorKey], ...] = ()
    freed: tuple[AccumulatorKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """A Score in flight: its attempts, and how many rows each has. It touches no accumulator."""

    cell: int
    attempts: tuple[tuple[TrajectoryState, int], ...]
    group: None = None


Item = StepItem | FoldItem | ScoreItem
