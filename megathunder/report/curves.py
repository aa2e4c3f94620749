"""The curves of a run as one SVG: what it learned, where the time went, how exact it was. Called by `report.py`."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

from megathunder.metrics.row import MetricsRow
from megathunder.report import plot_style

Panel = Callable[[Axes], None]


def draw_curves(rows: Sequence[MetricsRow]) -> str:
    """Six panels over the updates, as an SVG element."""
    panels = (_reward, _step_wall, _tail, _busy, _mismatch, _lag)
    return draw([functools.partial(panel, rows=rows) for panel in panels], rows)


def draw(panels: Sequence[Panel], rows: Sequence[MetricsRow], *, columns: int = 3) -> str:
    """`panels` in lines of `columns`, as an SVG element; updates without a step are shaded in each."""
    lines = -(-len(panels) // columns)
    with plot_style.house_style():
        figure = Figure(figsize=(11.5, 3.2 * lines), layout="constrained")
        for axes, panel in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=True):
            plot_style.clean(axes)
            panel(axes)
            for line in axes.lines if len(rows) < 4 else ():
                if line.get_linestyle() == "-":
                    line.set_marker("o")
            _shade(axes, rows)
            axes.set_xlim(rows[0].update - 0.6, rows[-1].update + 0.6)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.set_xlabel("update")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _shade(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    for stepped, some in itertools.groupby(rows, key=lambda row: row.stepped):
        updates = [row.update for row in some]
        if not stepped:
            axes.axvspan(updates[0] - 0.5, updates[-1] + 0.5, color=plot_style.BAD, alpha=0.13, linewidth=0, zorder=0)


def _x(rows: Sequence[MetricsRow]) -> list[int]:
    return [row.update for row in rows]


def _reward(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("reward")
    axes.plot(_x(rows), [r.reward_mean for r in rows], color=plot_style.ROLLOUT, label="training", linewidth=1.6)
    taken = [r for r in rows if r.success_heldout is not None]
    heldout = [r.success_heldout for r in taken if r.success_heldout is not None]
    if taken:
        axes.plot(_x(taken), heldout, "o-", color=plot_style.GOOD, label="held-out", markersize=4)
    if all(0 <= r.reward_mean <= 1 for r in rows):
        axes.set_ylim(0, 1.02)
    axes.legend(frameon=False, loc="lower right", fontsize=8)


def _step_wall(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("step wall, seconds")
    parts = {
        "rollout": [r.rollout_s for r in rows],
        "tail": [r.tail_s for r in rows],
        "suffix": [r.suffix_s for r in rows],
    }
    colours = (plot_style.ROLLOUT_LIGHT, plot_style.TAIL, plot_style.SUFFIX)
    below = [0.0] * len(rows)
    for (name, values), colour in zip(parts.items(), colours, strict=True):
        axes.bar(_x(rows), values, bottom=below, width=0.92, color=colour, label=name, linewidth=0)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")
    axes.set_ylim(0, max(below, default=1) * 1.18 or 1)


def _tail(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("tail after the last reward, seconds")
    axes.plot(_x(rows), [r.tail_s for r in rows], color=plot_style.TAIL, linewidth=1.6)
    axes.set_ylim(bottom=0)


def _busy(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("learner busy, share of the step wall")
    axes.plot(_x(rows), [r.learner_busy_share for r in rows], color=plot_style.LEARNER, linewidth=1.6)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _mismatch(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("|log p learner - log p engine|")
    greatest = [r.engine_learner_logprob_diff_max for r in rows]
    mean = [r.engine_learner_logprob_diff_mean for r in rows]
    axes.plot(_x(rows), greatest, color=plot_style.BAD, label="largest", linewidth=1.4)
    axes.plot(_x(rows), mean, color=plot_style.SUFFIX, label="mean", linewidth=1.4)
    if positive := [value for value in [*greatest, *mean] if value > 0]:
        axes.set_yscale("log")
        axes.set_ylim(10.0 ** math.floor(math.log10(min(positive))), 10.0 ** math.ceil(math.log10(max(positive)) + 0.1))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8)


def _lag(axes: Axes, rows: Sequence[MetricsRow]) -> None:
    axes.set_title("policy lag, versions")
    axes.plot(_x(rows), [r.policy_lag_max for r in rows], color=plot_style.INK, linewidth=1.6, drawstyle="steps-mid")
    axes.set_ylim(-0.1, max([r.policy_lag_max for r in rows] + [1]) + 0.2)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
