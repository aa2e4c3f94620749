"""Colours and axes shared by the timeline and the curves; drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes

matplotlib.use("Agg")

INK, FAINT, GRID = "#1f2430", "#6b7280", "#e5e7eb"
ROLLOUT, ROLLOUT_LIGHT = "#e07a1f", "#f7d9b8"
LEARNER, LEARNER_LIGHT = "#2563b0", "#bcd3ee"
TAIL, SUFFIX, GOOD, BAD = "#8b3fa8", "#5b6b7b", "#2f8f5b", "#c0362c"
IDLE = "#c9ced6"


@contextmanager
def house_style() -> Iterator[None]:
    """Matplotlib settings of every figure of a run."""
    settings = {
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "text.color": INK,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "hatch.linewidth": 0.6,
        "svg.fonttype": "none",
        "svg.hashsalt": "megathunder",
    }
    with matplotlib.rc_context(settings):
        yield


def clean(axes: Axes) -> None:
    """No box, a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
