"""What the scheduler knows of an update: groups of attempts, attempts of chains, chains of turns.

    Group    trajectories of one prompt: distinct rewards so far, coefficients once closed, accumulators held, its cell
    TrajectoryState  one trajectory: ended, lost, shaped reward
    Chain    one row of it: turns that extend each other, how far the learner is (`context` turns), where its gradient

Mutable, owned by one scheduler, seen by nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megathunder.objectives.advantage import Coefficients
from megathunder.schedule.token_chain import TokenChain
from megathunder.types import AccumulatorKey, ContributionId, Trajectory, TrajectoryId

QueueKey = tuple[str, int]


@dataclass(slots=True, eq=False)
class Chain:
    """One row. `sources` has one contribution a turn (OPD) or the trajectory's alone (GRPO)."""

    attempt: TrajectoryState
    row: int  # names it to the learner: counts over failed runs of the trajectory too
    rollout_row: int  # row of the present run
    tokens: TokenChain = field(default_factory=TokenChain)
    sources: list[ContributionId] = field(default_factory=list)
    closed: bool = False  # no further turn will come
    abandoned: bool = False  # its gradient is not wanted any more
    cell: int | None = None  # holds keys and values of its first `context` turns
    context: int = 0  # turns that the learner has forwarded
    in_flight: bool = False
    done: bool = False
    held: AccumulatorKey | None = None  # where its gradient waits for the closure
    queue: QueueKey | None = None
    spent_tokens: int = 0  # that the learner computed for it
    held_loss: float = 0.0  # of what went to an accumulator: its coefficient comes with the closure


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One trajectory."""

    id: TrajectoryId
    group: Group
    chains: list[Chain] = field(default_factory=list)
    first_chain: int = 0  # chains before it belong to runs of this trajectory that failed
    turn_offset: int = 0  # turns of those runs, so that contribution ids stay unique
    ended: bool = False
    complete: bool = False
    lost: bool = False
    resolved: bool = False
    raw_reward: float | None = None
    reward: float | None = None  # shaped; known once complete and rewarded
    divergence: float | None = None  # from the reference, where the reward depends on it
    in_flight: bool = False  # a cell compares it with the reference
    trajectory: Trajectory | None = None
    early_scores: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def source(self) -> ContributionId:
        return ContributionId(*self.id)

    @property
    def trained_tokens(self) -> int:
        return sum(c.tokens.trained_tokens() for c in self.live_chains)

    @property
    def live_chains(self) -> list[Chain]:
        """Chains whose gradient enters the update."""
        return [c for c in self.chains if not c.abandoned]

    @property
    def all_scored(self) -> bool:
        return all(c.tokens.scored == c.tokens.turns for c in self.live_chains)

    @property
    def turns(self) -> int:
        """Turns seen in the present run of this trajectory."""
        return sum(c.tokens.turns for c in self.chains[self.first_chain :])

    def locate(self, turn: int) -> tuple[Chain, int] | None:
        """Chain and index in it of turn `turn` of the present run."""
        for chain in self.chains[self.first_chain :]:
            if turn < chain.tokens.turns:
                return chain, turn
            turn -= chain.tokens.turns
        return None


@dataclass(slots=True, eq=False)
class Group:
    """Trajectories of one prompt. `values` are the distinct shaped rewards in order of arrival."""

    index: int
    attempts: list[TrajectoryState] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    resolved: int = 0
    closed: bool = False
    no_signal: bool = False  # closed with equal rewards, or dropped
    counts: bool = True  # its survivors' tokens count in the normaliser
    coefficients: Coefficients | None = None
    cell: int | None = None
    keys: set[AccumulatorKey] = field(default_factory=set)
    in_flight: int = 0  # commands that touch its accumulators

    @property
    def chains(self) -> Iterator[Chain]:
        return (chain for attempt in self.attempts for chain in attempt.chains)

    @property
    def has_signal(self) -> bool:
        """Holds two different rewards: it cannot turn out to have zero advantage."""
        return len(self.values) > 1

    @property
    def survivors(self) -> list[TrajectoryState]:
        return [a for a in self.attempts if a.complete and not a.lost]
