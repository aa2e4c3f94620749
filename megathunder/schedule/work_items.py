"""What a cell is to do next, or is doing: all that its command needs, and what its answer is booked on.

next_work (choice) -> WorkItem -> answers.start (command) -> the cell -> answers.apply_answer
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.accumulator_keys import BATCH, AccumulatorKey, FoldTerm
from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.types import TrainRow


@dataclass(frozen=True, slots=True)
class WorkStep:
    """Of a chain: turns [context, end) are new to the learner, turns [mask_from, end) are trained."""

    context: int
    end: int
    mask_from: int
    last: bool
    forward_only: bool = False

    def new_tokens(self, chain: Chain) -> int:
        ends = chain.tokens.ends
        return (ends[self.end - 1] if self.end else 0) - (ends[self.context - 1] if self.context else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItem:
    """A micro-batch of chains, the accumulator that they are added to, and the new tokens of each when it was made."""

    cell: int
    target: AccumulatorKey
    steps: tuple[tuple[Chain, WorkStep], ...]
    tokens: tuple[int, ...]

    @property
    def first(self) -> TrajectoryState:
        return self.steps[0][0].trajectory

    @property
    def group(self) -> Group | None:
        """Whose accumulators it touches."""
        return None if self.target == BATCH else self.first.group


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldItem:
    """A fold. `closing` empties the group; otherwise `assigned` trajectories move from accumulators of their own."""

    cell: int
    group: Group
    closing: bool
    terms: tuple[FoldTerm, ...] = ()
    freed: tuple[AccumulatorKey, ...] = ()
    assigned: tuple[tuple[TrajectoryState, AccumulatorKey], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """A comparison with the reference: trajectories, and the rows of each. It touches no accumulator."""

    cell: int
    trajectories: tuple[tuple[TrajectoryState, tuple[TrainRow, ...]], ...]
    group: None = None


WorkItem = StepItem | FoldItem | ScoreItem
