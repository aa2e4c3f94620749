"""The ledger of one update: every contribution that is registered ends APPLIED or DROPPED with a reason, exactly once.

Balanced: registered = applied + dropped. Called by the scheduler; read by metrics and by the barrier.
Refuses (IllegalMove) a contribution registered twice and every move that the lifecycle does not have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from megathunder.errors import IllegalMove
from megathunder.schedule.lifecycle import REQUIRED, START, Path, State, move
from megathunder.types import ContributionId


class Drop(str, Enum):
    """Why a contribution is not in the step."""

    LOST = "lost"
    GROUP_DROPPED = "group_dropped"
    EQUAL_REWARDS = "equal_rewards"
    REPLACED = "replaced"
    NO_STEP = "no_step"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """Contributions by fate. `open` are not yet FOLDED, APPLIED or DROPPED."""

    registered: int
    folded: int
    applied: int
    open: int
    dropped: int
    dropped_by_reason: dict[str, int]
    """Reason to count, sorted by reason."""

    @property
    def balanced(self) -> bool:
        return self.registered == self.applied + self.dropped


class Ledger:
    """Paths of all contributions of one update."""

    def __init__(self) -> None:
        self._paths: dict[ContributionId, Path] = {}
        self._states: Counter[State] = Counter()
        self._reasons: Counter[Drop] = Counter()

    def register(self, contribution: ContributionId) -> None:
        if contribution in self._paths:
            raise IllegalMove(f"{contribution} is registered twice")
        self._paths[contribution] = START
        self._states[State.GENERATING] += 1

    def move(self, contribution: ContributionId, to: State) -> None:
        path = self._paths[contribution]
        self._paths[contribution] = move(path, to, contribution)
        self._states[path[-1]] -= 1
        self._states[to] += 1

    def drop(self, contribution: ContributionId, reason: Drop) -> None:
        self.move(contribution, State.DROPPED)
        self._reasons[reason] += 1

    def state(self, contribution: ContributionId) -> State:
        return self._paths[contribution][-1]

    def ready_to_fold(self, contribution: ContributionId) -> bool:
        """Both inputs of FOLDED are there and it is neither folded nor dropped."""
        path = self._paths[contribution]
        return path[-1] in (State.REWARDED, State.DIFFERENTIATED) and set(REQUIRED[State.FOLDED]) <= set(path)

    @property
    def settled(self) -> bool:
        """Nothing is left to differentiate or fold."""
        states = self._states
        return states[State.FOLDED] + states[State.APPLIED] + states[State.DROPPED] == len(self._paths)

    def apply(self) -> None:
        """The step was taken: everything folded is APPLIED."""
        for contribution, path in list(self._paths.items()):
            if path[-1] is State.FOLDED:
                self.move(contribution, State.APPLIED)

    def abandon(self, reason: Drop) -> None:
        """No step was taken: everything folded is DROPPED."""
        for contribution, path in list(self._paths.items()):
            if path[-1] is State.FOLDED:
                self.drop(contribution, reason)

    @property
    def counts(self) -> LedgerCounts:
        states = self._states
        ended = states[State.FOLDED] + states[State.APPLIED] + states[State.DROPPED]
        return LedgerCounts(
            registered=len(self._paths),
            folded=states[State.FOLDED],
            applied=states[State.APPLIED],
            open=len(self._paths) - ended,
            dropped=states[State.DROPPED],
            dropped_by_reason=dict(sorted((r.value, n) for r, n in self._reasons.items())),
        )
