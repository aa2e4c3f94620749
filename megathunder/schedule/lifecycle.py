"""States of a contribution and the one table of moves between them.

    GENERATING -> COMPLETE -> (REWARDED | DIFFERENTIATED, in either order) -> FOLDED -> APPLIED
    any state before APPLIED -> DROPPED (with a reason)

REWARDED reads "its weight's last input is known": the reward of a trajectory, the teacher's score of a turn. FOLDED
means that the gradient is in the batch accumulator. Called by the ledger. Refuses (IllegalMove) every move that is
not in the table, a state entered twice, and FOLDED before both of its inputs.
"""

from __future__ import annotations

from enum import Enum

from megathunder.errors import IllegalMove


class State(str, Enum):
    GENERATING = "generating"
    COMPLETE = "complete"
    REWARDED = "rewarded"
    DIFFERENTIATED = "differentiated"
    FOLDED = "folded"
    APPLIED = "applied"
    DROPPED = "dropped"


_S = State
MOVES: dict[State, tuple[State, ...]] = {
    _S.GENERATING: (_S.COMPLETE, _S.DROPPED),
    _S.COMPLETE: (_S.REWARDED, _S.DIFFERENTIATED, _S.DROPPED),
    _S.REWARDED: (_S.DIFFERENTIATED, _S.FOLDED, _S.DROPPED),
    _S.DIFFERENTIATED: (_S.REWARDED, _S.FOLDED, _S.DROPPED),
    _S.FOLDED: (_S.APPLIED, _S.DROPPED),
    _S.APPLIED: (),
    _S.DROPPED: (),
}
REQUIRED: dict[State, tuple[State, ...]] = {_S.FOLDED: (_S.REWARDED, _S.DIFFERENTIATED)}

Path = tuple[State, ...]
START: Path = (_S.GENERATING,)


def move(path: Path, to: State, name: object) -> Path:
    """The states that contribution `name` has been in, after a legal move to `to`; IllegalMove otherwise."""
    missing = [s.value for s in REQUIRED.get(to, ()) if s not in path]
    if to not in MOVES[path[-1]] or to in path or missing:
        legal = ", ".join(s.value for s in MOVES[path[-1]] if s not in path) or "none"
        need = f" (it was never {', '.join(missing)})" if missing else ""
        raise IllegalMove(f"{name}: {path[-1].value} -> {to.value}{need}; legal from here: {legal}")
    return (*path, to)
