"""Weights of a group: features known when a trajectory completes, times coefficients known when its group closes.

    weight of trajectory i = sum_k c_k phi_k(i)          update = sum_k c_k (sum_i phi_k(i) g_i)

    accumulator      phi_k(i)                        c_k                                    weights that have it
    class v          1 if the signal of i is v       the weight of signal v                 all
    moment 0 .. K    1, r_1(i) .. r_K(i)             constant, slope_1 .. slope_K           Affine
    per trajectory   1 if i is its trajectory        the weight of its signal               all

The signal of a trajectory is the tuple of rewards that the objective compares: (r,) or (r_1, ..., r_K). Every function
of the signals of a group that treats equal signals equally is a `Table`; an `Affine` one needs no table.
Called by objectives (which make weights) and by the schedule (which folds accumulators with them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm

Signal = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Affine:
    """weight = constant + sum_k slopes[k] * signal[k]."""

    constant: float
    slopes: tuple[float, ...]

    def weight(self, signal: Signal) -> float:
        return sum(a * r for a, r in zip(self.slopes, signal, strict=True)) + self.constant

    def moment(self, slot: int) -> float:
        """Coefficient of moment accumulator `slot`."""
        return self.constant if slot == 0 else self.slopes[slot - 1]


@dataclass(frozen=True, slots=True)
class Table:
    """weight = by_signal[signal]."""

    by_signal: Mapping[Signal, float]

    def weight(self, signal: Signal) -> float:
        return self.by_signal[signal]

    def moment(self, slot: int) -> float:
        raise AssertionError("a table has no moments: Objective.target names none where weights are not affine")


Weights = Affine | Table


def features(signal: Signal) -> tuple[float, ...]:
    """phi of the moments: (1, r_1, ..., r_K)."""
    return (1.0, *signal)


def accumulators(target: AccumulatorKey, signal: Signal | None) -> tuple[AccumulatorKey, ...]:
    """What work for `target` adds to: all moments of the group, or the target alone."""
    if target.kind is not AccumulatorKind.MOMENT:
        return (target,)
    assert signal is not None, "moments need the rewards"
    return tuple(target._replace(slot=slot) for slot in range(1 + len(signal)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldPlan:
    """Accumulator arithmetic: apply `terms` in order, then release `free`."""

    terms: tuple[FoldTerm, ...]
    free: tuple[AccumulatorKey, ...]


def assign_reward(source: AccumulatorKey, target: AccumulatorKey, signal: Signal) -> FoldPlan:
    """The rewards of a trajectory that waits in an accumulator of its own are known while its group is still open."""
    factors = features(signal) if target.kind is AccumulatorKind.MOMENT else (1.0,)
    terms = zip(accumulators(target, signal), factors, strict=True)
    return FoldPlan(terms=tuple(FoldTerm(source, key, factor) for key, factor in terms), free=(source,))


def fold_group(
    keys: Iterable[AccumulatorKey], values: Sequence[Signal], by_trajectory: Mapping[int, Signal], weights: Weights
) -> FoldPlan:
    """Fold the accumulators `keys` of a closed group into the batch. `values` are its distinct signals in slot order,
    `by_trajectory` the signals of trajectories that have an accumulator each."""
    terms: list[FoldTerm] = []
    free = tuple(sorted(keys))
    for key in free:
        if key.kind is AccumulatorKind.MOMENT:
            coefficient = weights.moment(key.slot)
        else:
            signal = values[key.slot] if key.kind is AccumulatorKind.CLASS else by_trajectory[key.slot]
            coefficient = weights.weight(signal)
        terms.append(FoldTerm(key, BATCH, coefficient))
    return FoldPlan(terms=tuple(terms), free=free)
