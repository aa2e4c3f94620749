"""The figure of several runs: a score against what it cost, a panel a k, with the target and the budget.

Called by tools/evaluate.py. Points are measured; the line between two of them is drawn as steps, since nothing was
measured there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from megathunder.report import plot_style

COLOURS = (plot_style.LEARNER, plot_style.ROLLOUT, plot_style.TAIL, plot_style.GOOD, plot_style.BAD, plot_style.SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One run: hours, and the score with its interval, [points] each."""

    name: str
    hours: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """All runs at one k; `target` is a score, `budget` in hours."""

    title: str
    series: Sequence[Series]
    target: float
    budget: float


def draw_costs(panels: Sequence[Panel], unit: str, path: Path) -> None:
    """Write the figure as PNG. `unit`: GPU-hours or machine-hours."""
    with plot_style.house_style():
        figure = Figure(figsize=(max(5.4, 4.2 * len(panels)), 4.0), layout="constrained")
        for number, (axes, panel) in enumerate(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels)):
            _draw(axes, panel, legend=number == 0)
            lines = f"dotted: target {panel.target:.1%}, dashed: budget {panel.budget:.3g} h"
            axes.set_xlabel(f"{unit} of training\n{lines}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160)


def _draw(axes: Axes, panel: Panel, *, legend: bool) -> None:
    plot_style.clean(axes)
    axes.set_title(panel.title)
    shift = 0.004 * max((max(s.hours, default=0.0) for s in panel.series), default=0.0)
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % len(COLOURS)]
        place = [hour + shift * (number - (len(panel.series) - 1) / 2) for hour in series.hours]  # bars side by side
        below = [value - low for value, low in zip(series.values, series.low)]
        above = [high - value for value, high in zip(series.values, series.high)]
        axes.errorbar(place, series.values, [below, above], fmt="none", ecolor=colour, elinewidth=1.0, alpha=0.45)
        axes.plot(series.hours, series.values, "o", color=colour, markersize=4.5, label=series.name)
        axes.plot(series.hours, series.values, color=colour, linewidth=1.4, drawstyle="steps-post", alpha=0.8)
    axes.axhline(panel.target, color=plot_style.INK, linewidth=0.9, linestyle=":")
    axes.axvline(panel.budget, color=plot_style.FAINT, linewidth=0.9, linestyle="--")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(left=0 if shift else None)
    axes.set_ylim(bottom=0)
    if legend:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
