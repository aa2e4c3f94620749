"""The timeline of the last updates: rollout above the axis, learner below, idle time hatched.

    above   a row for each trajectory in flight (rows are reused): turns full, waiting for tools light
    below   a row for each learner cell: differentiate, fold, step, publish
    hatched nobody works there: rollout after the last reward, a cell between two work items

Drawn from `events.jsonl`; called by `report.py`. Needs at least one span in the lane `update`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megathunder.metrics.spans import Span
from megathunder.report import plot_style
from megathunder.tracing import LEARNER_LANES, ROLLOUT_LANES, UPDATE_LANE

ROLLOUT_COLOURS = {"turn": plot_style.ROLLOUT, "score": plot_style.GOOD, "verifier": "#6d5a1e"}
LEARNER_COLOURS = {
    "score": plot_style.GOOD,
    "fold": plot_style.LEARNER_LIGHT,
    "step": plot_style.TAIL,
    "publish": plot_style.SUFFIX,
    "save": plot_style.FAINT,
}
LEARNER_KINDS = ("differentiate", *LEARNER_COLOURS)
DEPTH = 0.42
WORD = 0.075  # of the width of the picture: a label
"""Height of the learner's part, as a share of the rollout's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The updates that are drawn: their phases, and the seconds they span."""

    updates: tuple[int, ...]
    start_s: float
    end_s: float
    phases: tuple[Span, ...]


def last_updates(spans: Sequence[Span], count: int) -> Window | None:
    """The window of the newest `count` updates that have all their phases; None where there is none."""
    phases = [span for span in spans if span.lane == UPDATE_LANE and span.update is not None]
    complete = sorted({span.update for span in phases if span.name == "suffix" and span.update is not None})
    chosen = tuple(complete[-count:])
    mine = tuple(span for span in phases if span.update in chosen)
    if not mine:
        return None
    return Window(updates=chosen, start_s=min(s.start_s for s in mine), end_s=max(s.end_s for s in mine), phases=mine)


def draw_timeline(spans: Sequence[Span], path: Path, *, updates: int = 4, title: str = "") -> bool:
    """Draw the last `updates` updates to `path` (PNG); False where there is nothing to draw."""
    window = last_updates(spans, updates)
    if window is None:
        return False
    inside = [span for span in spans if span.end_s > window.start_s and span.start_s < window.end_s]
    with plot_style.house_style():
        figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        _draw_rollouts(axes, inside, window)
        _draw_learner(axes, inside, window)
        _draw_phases(axes, window)
        _draw_between(axes, window)
        _finish(axes, window, title)
        axes.legend(
            handles=_legend({span.name for span in inside}), loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=9,
            frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.4,
        )  # fmt: skip
        figure.savefig(path, format="png")
    return True


def draw_schedules(spans: Sequence[Span], updates: Mapping[str, int], path: Path) -> bool:
    """A panel for each schedule, all on one axis of seconds: the update that `updates` names for it; False without."""
    windows = {}
    for name, update in updates.items():
        mine = [span for span in spans if span.lane != UPDATE_LANE or span.update == update]
        if (window := last_updates(mine, 1)) is not None:
            windows[name] = window
    if not windows:
        return False
    kinds = {span.name for span in spans}
    longest = max(window.end_s - window.start_s for window in windows.values())
    with plot_style.house_style():
        figure = Figure(figsize=(12, 0.9 + 2.4 * len(windows)), dpi=150, layout="constrained")
        for axes, (name, window) in zip(figure.subplots(len(windows), squeeze=False)[:, 0], windows.items()):
            inside = [span for span in spans if span.end_s > window.start_s and span.start_s < window.end_s]
            _draw_rollouts(axes, inside, window)
            _draw_learner(axes, inside, window)
            _draw_phases(axes, window)
            last = name == [*windows][-1]
            _finish(axes, window, f"{name}: {window.end_s - window.start_s:.2f} s")
            axes.set_xlim(0, longest)
            axes.set_xlabel("seconds" if last else "")
        figure.legend(handles=_legend(kinds), loc="outside lower center", ncols=9, frameon=False, fontsize=8)
        figure.savefig(path, format="png")
    return True


def gaps(busy: Iterable[tuple[float, float]], start_s: float, end_s: float) -> list[tuple[float, float]]:
    """What of [start_s, end_s] no interval of `busy` covers, in order."""
    free, reached = [], start_s
    for begin, end in sorted(busy):
        if begin > reached:
            free.append((reached, min(begin, end_s)))
        reached = max(reached, end)
        if reached >= end_s:
            return free
    return [*free, (reached, end_s)]


def rows_for(spans: Sequence[Span]) -> list[int]:
    """A row for each span such that spans of one row do not overlap, in as few rows as there are at once."""
    ends: list[float] = []
    rows = []
    for span in spans:
        row = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        ends[row : row + 1] = [span.end_s]
        rows.append(row)
    return rows


def _draw_rollouts(axes: Axes, spans: Sequence[Span], window: Window) -> None:
    """Rows of trajectories between 0 and 1; every lane's own turns are drawn in its trajectory's row."""
    whole = [s for s in spans if s.lane.startswith(ROLLOUT_LANES) and s.name == "trajectory"]
    by_lane: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    rows = rows_for(whole)
    height = 1.0 / (max(rows, default=0) + 1)
    for trajectory, row in zip(whole, rows, strict=True):
        at = row * height
        left = max(trajectory.start_s, window.start_s) - window.start_s
        width = min(trajectory.end_s, window.end_s) - window.start_s - left
        axes.broken_barh([(left, width)], (at, height * 0.86), color=plot_style.ROLLOUT_LIGHT, linewidth=0)
        for name, colour in ROLLOUT_COLOURS.items():
            parts = [
                (s.start_s - window.start_s, s.end_s - s.start_s)
                for s in by_lane[trajectory.lane]
                if s.name == name and trajectory.start_s <= s.start_s <= trajectory.end_s
            ]
            axes.broken_barh(parts, (at, height * 0.86), color=colour, linewidth=0)
    busy = [(s.start_s, s.end_s) for s in whole]
    _hatch(axes, gaps(busy, window.start_s, window.end_s), window, (0.0, 1.0))


def _draw_learner(axes: Axes, spans: Sequence[Span], window: Window) -> None:
    """Rows of cells between -DEPTH and 0, cell 0 next to the axis."""
    lanes = sorted({s.lane for s in spans if s.lane.startswith(LEARNER_LANES)}, key=lambda lane: (len(lane), lane))
    height = DEPTH / max(len(lanes), 1)
    for number, lane in enumerate(lanes):
        at = -(number + 1) * height
        mine = [s for s in spans if s.lane == lane and s.name in LEARNER_KINDS]
        for name in LEARNER_KINDS:
            parts = [(s.start_s - window.start_s, s.end_s - s.start_s) for s in mine if s.name == name]
            colour = LEARNER_COLOURS.get(name, plot_style.LEARNER)
            axes.broken_barh(parts, (at + height * 0.07, height * 0.86), color=colour, linewidth=0)
        idle = gaps([(s.start_s, s.end_s) for s in mine], window.start_s, window.end_s)
        visible = [gap for gap in idle if gap[1] - gap[0] > (window.end_s - window.start_s) / 800]
        _hatch(axes, visible, window, (at + height * 0.07, height * 0.86))


def _hatch(axes: Axes, idle: Iterable[tuple[float, float]], window: Window, rows: tuple[float, float]) -> None:
    parts = [(begin - window.start_s, end - begin) for begin, end in idle]
    axes.broken_barh(parts, rows, facecolor="none", edgecolor=plot_style.IDLE, hatch="////", linewidth=0)


def _draw_phases(axes: Axes, window: Window) -> None:
    """Where each update starts, where its last reward came, and how long the learner went on after it; in words where
    the rollout between the two leaves them room."""
    length_s, rollouts = window.end_s - window.start_s, {}
    for span in window.phases:
        left, right = span.start_s - window.start_s, span.end_s - window.start_s
        if span.name == "rollout":
            rollouts[span.update] = room = (right - left) / length_s
            label = f" update {span.update}" if room > WORD else f" {span.update}" if room > WORD / 3 else ""
            axes.axvline(left, color=plot_style.INK, linewidth=0.9)
            axes.text(left, 1.025, label, fontsize=8, fontweight="bold")
        elif span.name == "tail":
            axes.axvline(left, color=plot_style.BAD, linewidth=0.9, linestyle=(0, (3, 2)))
            axes.axvspan(left, right, ymin=0, ymax=1, color=plot_style.TAIL, alpha=0.07, linewidth=0)
            if rollouts.get(span.update, 1.0) > 2 * WORD:
                axes.text(left, 1.025, f"tail {right - left:.2f} s ", fontsize=8, color=plot_style.BAD, ha="right")


def _draw_between(axes: Axes, window: Window) -> None:
    """What lies between two updates (evaluation, checkpoints) belongs to neither; it is shaded where it is visible."""
    phases = [(span.start_s, span.end_s) for span in window.phases]
    for begin, end in gaps(phases, window.start_s, window.end_s):
        if end - begin > (window.end_s - window.start_s) / 50:
            left, right = begin - window.start_s, end - window.start_s
            axes.axvspan(left, right, color=plot_style.GRID, alpha=0.6, linewidth=0, zorder=0)
            axes.text(left, 1.025, " between updates", fontsize=8, color=plot_style.FAINT)


def _finish(axes: Axes, window: Window, title: str) -> None:
    axes.axhline(0, color=plot_style.INK, linewidth=1.2)
    axes.set_xlim(0, window.end_s - window.start_s)
    axes.set_ylim(-DEPTH - 0.02, 1.1)
    axes.set_yticks([0.5, -DEPTH / 2], ["rollout", "learner"], fontsize=10, fontweight="bold", color=plot_style.INK)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds")
    axes.set_title(title, pad=10)


def _legend(kinds: set[str]) -> list[Patch]:
    """What the colours mean; verifier and teacher only where spans of these `kinds` are drawn."""
    named = {
        "turn": plot_style.ROLLOUT,
        "waiting for a tool": plot_style.ROLLOUT_LIGHT,
        **({"verifier": ROLLOUT_COLOURS["verifier"]} if "verifier" in kinds else {}),
        **({"teacher's score": ROLLOUT_COLOURS["score"]} if "score" in kinds else {}),
        "forward and backward": plot_style.LEARNER,
        "fold": plot_style.LEARNER_LIGHT,
        "step": plot_style.TAIL,
        "publication": plot_style.SUFFIX,
    }
    handles = [Patch(facecolor=colour, label=name) for name, colour in named.items()]
    return [*handles, Patch(facecolor="white", edgecolor=plot_style.FAINT, hatch="////", linewidth=0, label="idle")]
