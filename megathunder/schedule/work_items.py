"""Work that cells are doing: what each command covers, so that its answer can be booked."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.schedule.state import Attempt, Chain, Group
from megathunder.schedule.step_planner import Pass
from megathunder.types import BATCH, AccumulatorKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PassItem:
    """A Differentiate in flight: its chains, the accumulator they are added to, and the new tokens of each."""

    cell: int
    target: AccumulatorKey
    passes: tuple[tuple[Chain, Pass], ...]
    tokens: tuple[int, ...]

    @property
    def group(self) -> Group | None:
        """Whose accumulators it touches."""
        return None if self.target == BATCH else self.passes[0][0].attempt.group


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldItem:
    """A Fold in flight. `closing` empties the group; otherwise `landed` attempts move from their own accumulators."""

    cell: int
    group: Group
    closing: bool
    landed: tuple[tuple[Attempt, AccumulatorKey], ...] = ()
    freed: tuple[AccumulatorKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """A Score in flight: its attempts, and how many rows each has. It touches no accumulator."""

    cell: int
    attempts: tuple[tuple[Attempt, int], ...]
    group: None = None


Item = PassItem | FoldItem | ScoreItem
