"""The closure of a group and the landing of rewards, as accumulator arithmetic.

    group state                        Fold
    closed, rewards differ             every accumulator into the batch with its coefficient, then freed
    closed with equal rewards, dropped nothing added, everything freed
    open, reward of an own landed      own into its class or moments, own freed
    open, trajectory of an own lost    own freed
    SALT, all trajectories there       every own into the batch, in one fold, whose coefficients the learner reweighs

Under exact sums a group is folded once, after all its trajectories and from its classes alone, so that every schedule
rounds alike. A landing frees an accumulator and costs a pass over it that the closure makes anyway: the dispatcher asks
for one where nothing better is to do, or the accumulator is needed. A group with commands in flight that touch its
accumulators is not folded yet. Called by the dispatcher.
"""

from __future__ import annotations

from megathunder.objectives.grpo import Grpo
from megathunder.schedule.state import Group, TrajectoryState
from megathunder.schedule.work_items import FoldItem
from megathunder.types import AccumulatorKey, AccumulatorKind, FoldTerm


class GroupCloser:
    """Makes the terms of folds. `once` is set under exact sums."""

    def __init__(self, objective: Grpo, *, once: bool) -> None:
        self._objective, self._once = objective, once

    def close_group(self, group: Group, cell: int) -> tuple[FoldItem, tuple[FoldTerm, ...]] | None:
        """The fold that ends this open group, if it can be made now."""
        if not group.keys or group.in_flight:
            return None
        if group.no_signal:
            return FoldItem(cell=cell, group=group, closing=True, freed=tuple(sorted(group.keys))), ()
        owns, kept = _owns(group), self._objective.own
        once = self._once or kept
        waiting = once and (owns and not kept or any(not c.held for a in group.survivors for c in a.live_chains))
        if group.coefficients is None or waiting:
            return None
        lost = tuple(k for k, a in owns.items() if a.lost)
        rewards = {k.slot: a.reward for k, a in owns.items() if a.reward is not None}
        remaining = group.keys.difference(lost)
        closure = self._objective.close(remaining, group.values, rewards, group.coefficients)
        return FoldItem(cell=cell, group=group, closing=True, freed=closure.free + lost), closure.terms

    def assign_rewards(self, group: Group, cell: int) -> tuple[FoldItem, tuple[FoldTerm, ...]] | None:
        """The fold that frees the own accumulators of this open group whose rewards have come."""
        if group.in_flight or group.no_signal:
            return None
        terms: list[FoldTerm] = []
        freed: list[AccumulatorKey] = []
        landed: list[tuple[TrajectoryState, AccumulatorKey]] = []
        for key, attempt in _owns(group).items():
            if attempt.lost:
                freed.append(key)
            elif attempt.reward is not None and not self._objective.own:
                target = self._objective.target(group, attempt.reward, key.slot)
                closure = self._objective.land(key, target, attempt.reward)
                terms += closure.terms
                freed += closure.free
                landed.append((attempt, target))
        if not freed:
            return None
        item = FoldItem(cell=cell, group=group, closing=False, landed=tuple(landed), freed=tuple(freed))
        return item, tuple(terms)


def _owns(group: Group) -> dict[AccumulatorKey, TrajectoryState]:
    return {key: group.attempts[key.slot] for key in sorted(group.keys) if key.kind is AccumulatorKind.PER_TRAJECTORY}
