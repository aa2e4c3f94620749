"""Schedules compared by what a score costs: checkpoints at a fixed cadence against GPU-hours (machine-hours).

    hours to a target    those of the first checkpoint whose pass@k reaches it; nothing is guessed between checkpoints
    score at a budget    pass@k of the latest checkpoint that was published within it
    common target        the highest pass@k that every run reaches;  common budget: the hours of the shortest run

Hours are step walls times the GPUs (machines) that the run holds: set-up and evaluation are left out, so that a run
that is evaluated more often does not look dearer. Every figure counts lost attempts as wrong. Called by
`compare_runs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from megathunder.evaluation.history import Evaluation


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluations of one run, in the order of their updates."""

    run: str
    schedule: str
    evaluations: tuple[Evaluation, ...]

    def points(self, k: int) -> list[tuple[Evaluation, float]]:
        """The evaluations that have a pass@k, with it."""
        pairs = ((evaluation, evaluation.pass_at(k)) for evaluation in self.evaluations)
        return [(e, estimate.value) for e, estimate in pairs if estimate is not None and estimate.value is not None]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One run at the target and at the budget; None: it never got there, or published nothing in time."""

    run: str
    schedule: str
    hours_to_target: float | None
    updates_to_target: int | None
    at_budget: float | None
    updates_at_budget: int | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All runs at one k. Targets are shares of 1, budgets hours."""

    k: int
    target: float
    budget_hours: float
    runs: tuple[Standing, ...]


def compare(
    curves: Sequence[Curve], k: int, *, target: float | None = None, budget_hours: float | None = None
) -> Comparison:
    """Every run at `target` and `budget_hours`, by default the common ones."""
    target = common_target(curves, k) if target is None else target
    budget_hours = common_budget(curves, k) if budget_hours is None else budget_hours
    return Comparison(
        k=k,
        target=target,
        budget_hours=budget_hours,
        runs=tuple(standing(curve, k, target, budget_hours) for curve in curves),
    )


def standing(curve: Curve, k: int, target: float, budget_hours: float) -> Standing:
    """Where one run stands."""
    points = curve.points(k)
    first = next((e for e, value in points if value >= target), None)
    last = next(((e, value) for e, value in reversed(points) if e.device_hours <= budget_hours), None)
    return Standing(
        run=curve.run,
        schedule=curve.schedule,
        hours_to_target=first.device_hours if first else None,
        updates_to_target=first.updates if first else None,
        at_budget=last[1] if last else None,
        updates_at_budget=last[0].updates if last else None,
    )


def common_target(curves: Sequence[Curve], k: int) -> float:
    """The highest pass@k that every run reaches."""
    return min(max(value for _, value in curve.points(k)) for curve in curves)


def common_budget(curves: Sequence[Curve], k: int) -> float:
    """The hours of the run whose last evaluated checkpoint came first."""
    return min(curve.points(k)[-1][0].device_hours for curve in curves)


def shared_ks(curves: Sequence[Curve], ks: Sequence[int]) -> list[int]:
    """Those of `ks` of which every run has a pass@k."""
    return [k for k in ks if curves and all(curve.points(k) for curve in curves)]
