"""The closure of a group, and rewards that come while it is open, as accumulator arithmetic.

    group state                             fold
    closed, its weights known               every accumulator into the batch with its coefficient, then freed
    dropped                                 nothing added, everything freed
    open, a reward has come to a            its accumulator into its class or moments, then freed
      trajectory that has an accumulator
    open, such a trajectory was lost        its accumulator freed
    SALT, all trajectories there            every accumulator into the batch, in one fold; the learner reweighs it

Where weights are applied at the closure alone (exact sums, SALT) a group is folded once, after all its trajectories and
under exact sums from its classes alone, so that every schedule rounds alike. Moving a reward frees an accumulator and
costs a pass over it that the closure makes anyway: it is done where nothing better is to do, or the accumulator is
needed. A group with commands in flight that touch its accumulators is not folded yet.
Pure functions of the state; called by the choice of work.
"""

from __future__ import annotations

from megathunder.accumulator_keys import AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.objectives.weights import assign_reward, fold_group
from megathunder.schedule.state import Group, TrajectoryState
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_items import FoldItem


def close_group(state: UpdateState, group: Group, cell: int) -> FoldItem | None:
    """The fold that ends this open group, if it can be made now."""
    if not group.keys or group.in_flight:
        return None
    if group.dropped is not None:
        return FoldItem(cell=cell, group=group, closing=True, freed=tuple(sorted(group.keys)))
    waiting = _with_accumulators(group)
    if group.weights is None or not group.closed or _must_wait(state, group, waiting):
        return None
    lost = tuple(key for key, trajectory in waiting.items() if trajectory.lost)
    signals = {key.slot: t.signal for key, t in waiting.items() if t.signal is not None}
    plan = fold_group(group.keys.difference(lost), group.values, signals, group.weights)
    return FoldItem(cell=cell, group=group, closing=True, terms=plan.terms, freed=plan.free + lost)


def _must_wait(state: UpdateState, group: Group, waiting: dict[AccumulatorKey, TrajectoryState]) -> bool:
    if not state.folds_at_closure(group):
        return False
    missing = any(not chain.held for t in group.survivors for chain in t.live_chains)
    return missing or bool(waiting and not state.objective.keeps_each_gradient)


def assign_rewards(state: UpdateState, group: Group, cell: int) -> FoldItem | None:
    """The fold that frees the accumulators of trajectories of this open group whose rewards have come."""
    if group.in_flight or group.dropped is not None:
        return None
    terms: list[FoldTerm] = []
    freed: list[AccumulatorKey] = []
    assigned: list[tuple[TrajectoryState, AccumulatorKey]] = []
    for key, trajectory in _with_accumulators(group).items():
        if trajectory.lost:
            freed.append(key)
        elif trajectory.signal is not None:
            target = state.objective.target(group, trajectory.signal, key.slot)
            if target == key:  # its own accumulator is where it waits for the closure
                continue
            plan = assign_reward(key, target, trajectory.signal)
            terms += plan.terms
            freed += plan.free
            assigned.append((trajectory, target))
    if not freed:
        return None
    done = (tuple(terms), tuple(freed), tuple(assigned))
    return FoldItem(cell=cell, group=group, closing=False, terms=done[0], freed=done[1], assigned=done[2])


def _with_accumulators(group: Group) -> dict[AccumulatorKey, TrajectoryState]:
    """The trajectories of a group that have an accumulator each."""
    keys = [key for key in sorted(group.keys) if key.kind is AccumulatorKind.PER_TRAJECTORY]
    return {key: group.trajectories[key.slot] for key in keys}
