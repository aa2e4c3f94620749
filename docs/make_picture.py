"""Draws the README's picture, docs/picture.svg: the same rollouts under `sync` and under `thundersync`.

    python docs/make_picture.py [OUT.svg]

Schematic: eight trajectories and one learner cell, each trajectory the same learner work; the learner's queue is
played through, nothing is measured.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megathunder.report import plot_style

REWARDED = (2.1, 2.7, 3.2, 3.9, 4.6, 5.4, 6.6, 8.6)
"""When each trajectory has its reward; arbitrary units."""
WORK, STEP = 0.95, 0.55
"""Learner work of one trajectory; reduction, step and publication together."""
END = 18.2


def play(released: tuple[float, ...]) -> list[float]:
    """When the learner begins each piece of work, first released first served."""
    starts, free = [], 0.0
    for at in sorted(released):
        starts.append(max(at, free))
        free = starts[-1] + WORK
    return starts


def draw(axes: Axes, name: str, released: tuple[float, ...], note: str) -> None:
    """One schedule: trajectories above the axis, the learner below."""
    starts = play(released)
    learned, last = starts[-1] + WORK, max(REWARDED)
    for row, rewarded in enumerate(reversed(REWARDED)):
        axes.broken_barh([(0, rewarded)], (row / 8, 0.095), color=plot_style.ROLLOUT_LIGHT, linewidth=0)
        axes.plot([rewarded], [row / 8 + 0.047], "o", color=plot_style.ROLLOUT, markersize=4)
    axes.broken_barh([(s + 0.03, WORK - 0.06) for s in starts], (-0.34, 0.26), color=plot_style.LEARNER, linewidth=0)
    axes.broken_barh([(learned + 0.03, STEP)], (-0.34, 0.26), color=plot_style.TAIL, linewidth=0)
    edges = [0.0, *(s + WORK for s in starts)]
    idle = [(b, e - b) for b, e in zip(edges, starts, strict=False) if e - b > 0.1]
    idle_style = {"facecolor": "none", "edgecolor": plot_style.IDLE, "hatch": "////", "linewidth": 0}
    axes.broken_barh(idle, (-0.34, 0.26), **idle_style)
    axes.broken_barh([(last, learned + STEP - last)], (0, 0.97), **idle_style)
    axes.axhline(-0.03, color=plot_style.INK, linewidth=1)
    axes.axvline(learned + STEP + 0.06, color=plot_style.INK, linewidth=1.4)
    axes.text(learned + STEP + 0.2, 0.47, "weights k+1\non every server", fontsize=9, va="center")
    axes.plot([last, last], [-0.36, 1.04], color=plot_style.BAD, linewidth=1, linestyle=(0, (3, 2)))
    axes.text(last + 0.1, 1.02, "last reward", fontsize=8.5, color=plot_style.BAD)
    axes.annotate(
        "", (last, -0.46), (learned, -0.46), arrowprops={"arrowstyle": "<->", "color": plot_style.INK, "lw": 0.9}
    )
    axes.text((last + learned) / 2, -0.63, "tail", fontsize=9, ha="center")
    axes.text(learned + STEP / 2, -0.63, "suffix", fontsize=9, ha="center", color=plot_style.TAIL)
    axes.set_title(name, fontsize=12)
    axes.text(0, -0.63, note, fontsize=9, color=plot_style.FAINT)
    axes.set_xlim(-0.1, END)
    axes.set_ylim(-0.7, 1.12)
    axes.set_yticks([0.47, -0.21], ["rollouts", "learner"], fontsize=10, color=plot_style.INK)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main(path: Path) -> None:
    """Draw both schedules below each other."""
    with plot_style.house_style(), matplotlib.rc_context({"svg.fonttype": "path"}):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        above, below = figure.subplots(2, 1)
        draw(above, "sync", (max(REWARDED),) * 8, "the learner waits for the whole batch")
        draw(below, "thundersync", REWARDED, "every trajectory is differentiated once its reward is there")
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs" / "picture.svg")
