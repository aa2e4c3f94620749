"""What the scheduler knows of an update: groups of trajectories, trajectories of chains, chains of turns.

    Group            trajectories of one prompt: distinct signals so far, weights once known, accumulators, its cell
    TrajectoryState  one trajectory: its phase, reward and signal
    Chain            one row of it: turns that extend each other, how far the learner is (`context` turns), where its
                     gradient waits

Mutable, owned by one `UpdateState`; only `events.py` and `answers.py` change them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megathunder.accumulator_keys import AccumulatorKey
from megathunder.objectives.base import Reward
from megathunder.objectives.weights import Signal, Weights
from megathunder.schedule.ledger import Drop
from megathunder.schedule.lifecycle import Inputs, Phase, Work, moved
from megathunder.schedule.token_chain import TokenChain
from megathunder.types import ContributionId, Trajectory, TrajectoryId

QueueKey = tuple[str, int]


@dataclass(slots=True, eq=False)
class Chain:
    """One row. `sources` has one contribution per turn (OPD) or that of the trajectory alone (GRPO)."""

    trajectory: TrajectoryState
    row: int  # names it to the learner: counts over failed runs of the trajectory too
    rollout_row: int  # row of the present run
    tokens: TokenChain = field(default_factory=TokenChain)
    sources: list[ContributionId] = field(default_factory=list)
    inputs: Inputs = Inputs.OPEN
    work: Work = Work.IDLE
    cell: int | None = None  # holds keys and values of its first `context` turns
    context: int = 0  # turns that the learner has forwarded
    held: AccumulatorKey | None = None  # where its gradient waits for the closure
    queue: QueueKey | None = None
    spent_tokens: int = 0  # that the learner computed for it
    held_loss: float = 0.0  # of what went to an accumulator: its coefficient comes with the closure

    @property
    def closed(self) -> bool:
        return self.inputs is not Inputs.OPEN

    @property
    def abandoned(self) -> bool:
        return self.inputs is Inputs.ABANDONED

    @property
    def done(self) -> bool:
        return self.work is Work.DONE

    def close(self) -> None:
        """No further turn will come."""
        if self.inputs is Inputs.OPEN:
            self.inputs = moved(self.inputs, Inputs.CLOSED, self)

    def abandon(self) -> None:
        """Its gradient is not wanted any more."""
        if self.inputs is not Inputs.ABANDONED:
            self.inputs = moved(self.inputs, Inputs.ABANDONED, self)

    def set_work(self, to: Work) -> None:
        self.work = moved(self.work, to, self)

    def __str__(self) -> str:
        return f"{self.trajectory.id}/row {self.row}"


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One trajectory."""

    id: TrajectoryId
    group: Group
    phase: Phase = Phase.SAMPLING
    chains: list[Chain] = field(default_factory=list)
    first_chain: int = 0  # chains before it belong to runs of this trajectory that failed
    turn_offset: int = 0  # turns of those runs, so that contribution ids stay unique
    reward: Reward | None = None  # as the verifier gave it
    signal: Signal | None = None  # what the objective compares; known once complete and rewarded
    divergence: float | None = None  # from the reference, where the signal depends on it
    rollout: Trajectory | None = None
    early_scores: dict[int, tuple[float, ...]] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.phase is not Phase.SAMPLING

    @property
    def lost(self) -> bool:
        return self.phase is Phase.LOST

    @property
    def complete(self) -> bool:
        """All tokens are fixed."""
        return self.phase in (Phase.COMPLETE, Phase.COMPARING, Phase.SETTLED)

    @property
    def settled(self) -> bool:
        return self.phase in (Phase.SETTLED, Phase.LOST)

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
    def present_chains(self) -> list[Chain]:
        """Chains of the present run of this trajectory."""
        return self.chains[self.first_chain :]

    @property
    def all_scored(self) -> bool:
        return all(c.tokens.scored == c.tokens.turns for c in self.live_chains)

    @property
    def turns(self) -> int:
        """Turns seen in the present run of this trajectory."""
        return sum(c.tokens.turns for c in self.present_chains)

    def locate(self, turn: int) -> tuple[Chain, int] | None:
        """Chain and index in it of turn `turn` of the present run."""
        for chain in self.present_chains:
            if turn < chain.tokens.turns:
                return chain, turn
            turn -= chain.tokens.turns
        return None


@dataclass(slots=True, eq=False)
class Group:
    """Trajectories of one prompt. `values` are the distinct signals and `raw_values` the distinct rewards, in order of
    arrival; `fixed_weights`: the weights were known before any trajectory was sampled."""

    index: int
    weights: Weights | None = None
    fixed_weights: bool = False
    trajectories: list[TrajectoryState] = field(default_factory=list)
    values: list[Signal] = field(default_factory=list)
    raw_values: list[float] = field(default_factory=list)
    closed: bool = False
    dropped: Drop | None = None  # why nothing of it enters the update
    cell: int | None = None
    keys: set[AccumulatorKey] = field(default_factory=set)
    in_flight: int = 0  # commands that touch its accumulators

    @property
    def chains(self) -> Iterator[Chain]:
        return (chain for trajectory in self.trajectories for chain in trajectory.chains)

    @property
    def counts(self) -> bool:
        """Its survivors' tokens count in the normaliser."""
        return self.dropped not in (Drop.GROUP_DROPPED, Drop.REPLACED)

    @property
    def survivors(self) -> list[TrajectoryState]:
        return [t for t in self.trajectories if t.complete]
