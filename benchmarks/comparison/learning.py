"""Learning curves of several variants and seeds: held-out success against updates and against training time.

    training time of a run   sum of its step walls: evaluation, checkpoints and starts are left out
    at one time              the last evaluation that every run had taken by the time at which the fastest one ended

Called by benchmarks/learning_curves.py. Reads rows of finished or unfinished runs; the drawing is steps, since
nothing was
measured between two evaluations.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megathunder.metrics.row import MetricsRow
from megathunder.report import plot_style

COLOURS = (plot_style.LEARNER, plot_style.ROLLOUT, plot_style.TAIL, plot_style.GOOD, plot_style.BAD, plot_style.SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: its evaluations [n], and totals of what it did."""

    variant: str
    seed: int
    updates: tuple[int, ...]
    wall_s: tuple[float, ...]
    heldout: tuple[float, ...]
    total_wall_s: float
    trajectories: int
    reward_last: float
    """Mean training reward of the last quarter of the updates."""
    straggled_share: float | None
    cancellation: float | None
    factor: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A variant over its seeds, mean and least and greatest."""

    variant: str
    seeds: int
    last: tuple[float, float, float]
    """Held-out success at the last evaluation."""
    at_one_time: tuple[float, float, float]
    """The same at the last evaluation within `Curves.time_s`."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Everything the tool writes. `time_s`: the training time of the run that ended first."""

    time_s: float
    curves: tuple[Curve, ...]
    summaries: tuple[Summary, ...]


def curve_of(variant: str, seed: int, rows: Sequence[MetricsRow]) -> Curve | None:
    """The curve of a run; None before its first evaluation."""
    walls = list(itertools.accumulate(row.step_wall_s for row in rows))
    taken = [(row, wall) for row, wall in zip(rows, walls, strict=True) if row.success_heldout is not None]
    if not taken:
        return None
    sized = [row.sizing for row in rows if row.sizing is not None and row.sizing.measured]
    measured = [row.salt for row in rows if row.salt is not None]
    late = rows[-max(len(rows) // 4, 1) :]
    return Curve(
        variant=variant,
        seed=seed,
        updates=tuple(row.update + 1 for row, _ in taken),
        wall_s=tuple(wall for _, wall in taken),
        heldout=tuple(float(row.success_heldout or 0.0) for row, _ in taken),
        total_wall_s=walls[-1],
        trajectories=sum(row.trajectories for row in rows),
        reward_last=statistics.fmean(row.reward_mean for row in late),
        straggled_share=sum(s.straggled for s in sized) / sum(s.measured for s in sized) if sized else None,
        cancellation=statistics.fmean(s.cancellation for s in measured) if measured else None,
        factor=statistics.fmean(s.factor for s in measured) if measured else None,
    )


def summarise(curves: Sequence[Curve]) -> Curves:
    """Variants in the order of their first run."""
    time_s = min(curve.total_wall_s for curve in curves)
    by_variant: dict[str, list[Curve]] = {}
    for curve in curves:
        by_variant.setdefault(curve.variant, []).append(curve)
    summaries = tuple(
        Summary(
            variant=variant,
            seeds=len(own),
            last=_spread([curve.heldout[-1] for curve in own]),
            at_one_time=_spread([_at(curve, time_s) for curve in own]),
            wall_s=statistics.fmean(curve.total_wall_s for curve in own),
        )
        for variant, own in by_variant.items()
    )
    return Curves(time_s=time_s, curves=tuple(curves), summaries=summaries)


def draw_learning(found: Curves, path: Path) -> None:
    """Held-out success against updates and against time; thin lines are runs, thick ones means of a variant."""
    with plot_style.house_style():
        figure = Figure(figsize=(11, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        colours = {s.variant: COLOURS[i % len(COLOURS)] for i, s in enumerate(found.summaries)}
        _draw(left, found, colours, [curve.updates for curve in found.curves], "updates")
        _draw(right, found, colours, [curve.wall_s for curve in found.curves], "seconds of training")
        right.axvline(found.time_s, color=plot_style.FAINT, linewidth=0.9, linestyle="--")
        left.legend(frameon=False, fontsize=8, loc="lower right")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)


def _draw(axes: Axes, found: Curves, colours: Mapping[str, str], places: Sequence[Sequence[float]], unit: str) -> None:
    plot_style.clean(axes)
    axes.set_title("held-out success")
    axes.set_xlabel(unit)
    by_variant: dict[str, list[tuple[Sequence[float], Sequence[float]]]] = {}
    for curve, place in zip(found.curves, places, strict=True):
        axes.plot(place, curve.heldout, color=colours[curve.variant], linewidth=0.8, alpha=0.4, drawstyle="steps-post")
        by_variant.setdefault(curve.variant, []).append((place, curve.heldout))
    for variant, runs in by_variant.items():
        count = min(len(place) for place, _ in runs)
        place = [statistics.fmean(p[i] for p, _ in runs) for i in range(count)]
        mean = [statistics.fmean(h[i] for _, h in runs) for i in range(count)]
        label = f"{variant} ({len(runs)} seed{'s' if len(runs) > 1 else ''})"
        axes.plot(place, mean, "o-", color=colours[variant], linewidth=1.8, markersize=4, label=label)
    axes.set_ylim(0, 1.02)


def _at(curve: Curve, time_s: float) -> float:
    """Held-out success at the last evaluation by `time_s`; of the first one where none was earlier."""
    within = [value for value, wall in zip(curve.heldout, curve.wall_s, strict=True) if wall <= time_s]
    return within[-1] if within else curve.heldout[0]


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.fmean(values), min(values), max(values)
