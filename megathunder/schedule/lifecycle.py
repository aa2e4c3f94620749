"""Where contributions, trajectories and chains stand, and the one table of moves between these states.

    contribution    GENERATING -> COMPLETE -> (REWARDED | DIFFERENTIATED, in either order) -> FOLDED -> APPLIED
                    any state before APPLIED -> DROPPED (with a reason)
    trajectory      SAMPLING -> COMPLETE <-> COMPARING -> SETTLED;     all but LOST -> LOST
    chain, inputs   OPEN -> CLOSED;                                    both -> ABANDONED
    chain, learner  IDLE <-> IN_FLIGHT -> DONE

REWARDED reads "its weight's last input is known": the reward of a trajectory, the teacher's score of a turn. FOLDED
means that the gradient is in the batch accumulator. SETTLED: nothing more of the trajectory is needed from outside (its
reward and divergence, or every score, is there, or its group was dropped; one of a dropped group may be LOST after
that). COMPARING: a cell computes its divergence from the reference. ABANDONED: the gradient is not wanted any more.
Called by the ledger and by whatever changes the state of an update. Refuses (IllegalMove) every move that is not in the
table, a state of a contribution entered twice, and FOLDED before both of its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from megathunder.errors import IllegalMove


class State(Enum):
    """Of a contribution."""

    GENERATING = "generating"
    COMPLETE = "complete"
    REWARDED = "rewarded"
    DIFFERENTIATED = "differentiated"
    FOLDED = "folded"
    APPLIED = "applied"
    DROPPED = "dropped"


class Phase(Enum):
    """Of a trajectory."""

    SAMPLING = "sampling"
    COMPLETE = "complete"
    COMPARING = "comparing"
    SETTLED = "settled"
    LOST = "lost"


class Inputs(Enum):
    """Of a chain: whether further turns may come."""

    OPEN = "open"
    CLOSED = "closed"
    ABANDONED = "abandoned"


class Work(Enum):
    """Of a chain: what the learner does with it."""

    IDLE = "idle"
    IN_FLIGHT = "in_flight"
    DONE = "done"


Stage = State | Phase | Inputs | Work
MOVES: Mapping[Stage, tuple[Stage, ...]] = {
    State.GENERATING: (State.COMPLETE, State.DROPPED),
    State.COMPLETE: (State.REWARDED, State.DIFFERENTIATED, State.DROPPED),
    State.REWARDED: (State.DIFFERENTIATED, State.FOLDED, State.DROPPED),
    State.DIFFERENTIATED: (State.REWARDED, State.FOLDED, State.DROPPED),
    State.FOLDED: (State.APPLIED, State.DROPPED),
    State.APPLIED: (),
    State.DROPPED: (),
    Phase.SAMPLING: (Phase.COMPLETE, Phase.LOST),
    Phase.COMPLETE: (Phase.COMPARING, Phase.SETTLED, Phase.LOST),
    Phase.COMPARING: (Phase.COMPLETE, Phase.SETTLED, Phase.LOST),
    Phase.SETTLED: (Phase.LOST,),
    Phase.LOST: (),
    Inputs.OPEN: (Inputs.CLOSED, Inputs.ABANDONED),
    Inputs.CLOSED: (Inputs.ABANDONED,),
    Inputs.ABANDONED: (),
    Work.IDLE: (Work.IN_FLIGHT,),
    Work.IN_FLIGHT: (Work.IDLE, Work.DONE),
    Work.DONE: (),
}
REQUIRED: dict[State, tuple[State, ...]] = {State.FOLDED: (State.REWARDED, State.DIFFERENTIATED)}

Path = tuple[State, ...]
START: Path = (State.GENERATING,)
AnyStage = TypeVar("AnyStage", State, Phase, Inputs, Work)


def moved(stage: AnyStage, to: AnyStage, name: object) -> AnyStage:
    """`to`, if `name` may go there from `stage`; IllegalMove otherwise."""
    if to not in MOVES[stage]:
        raise _illegal(stage, to, name, [s.value for s in MOVES[stage]])
    return to


def move(path: Path, to: State, name: object) -> Path:
    """The states that contribution `name` has been in, after a legal move to `to`; IllegalMove otherwise."""
    missing = [s.value for s in REQUIRED.get(to, ()) if s not in path]
    if to not in MOVES[path[-1]] or to in path or missing:
        need = f" (it was never {', '.join(missing)})" if missing else ""
        raise _illegal(path[-1], to, name, [s.value for s in MOVES[path[-1]] if s not in path], need)
    return (*path, to)


def _illegal(stage: Stage, to: Stage, name: object, legal: list[str], need: str = "") -> IllegalMove:
    return IllegalMove(f"{name}: {stage.value} -> {to.value}{need}; legal from here: {', '.join(legal) or 'none'}")
