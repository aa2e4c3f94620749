"""Results as JSON and figures. Every figure says "simulated" in its title. Called by tools/simulate.py.

sweep      closed form against replay, one point a configuration; relative difference by spread and balance
timeline   rollout above the axis, learner below, idle hatched
sagc       straggler rate and wall by policy, one row a stream; the controller's course
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen first

from benchmarks.papers.group_size_cases import SagcResult
from benchmarks.papers.sweep import SweepResult
from megathunder.simulator.schedule_replay import ReplayResult
from megathunder.simulator.traces import UpdateTrace

COLORS = {"grpo": "#c0504d", "opd": "#1f77b4"}


def write_json(result: object, path: Path) -> None:
    """A result dataclass as JSON."""
    assert is_dataclass(result) and not isinstance(result, type)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")


def draw_sweep(result: SweepResult, path: Path) -> None:
    """Scatter of the two predictions, and their difference against spread and balance."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    for name, color in COLORS.items():
        rows = [r for r in result.rows if r.objective == name]
        analytic = [r.analytic_speedup for r in rows]
        left.scatter([r.trace_speedup for r in rows], analytic, s=12, alpha=0.6, color=color, label=name.upper())
        for axis, key in ((middle, "spread"), (right, "balance")):
            levels = sorted({getattr(r, key) for r in rows})
            groups = [[100 * r.rel_diff for r in rows if getattr(r, key) == level] for level in levels]
            places = [i + (-0.18 if name == "grpo" else 0.18) for i in range(len(levels))]
            boxes = axis.boxplot(groups, positions=places, widths=0.3, patch_artist=True, sym=".")
            for box in boxes["boxes"]:
                box.set(facecolor=color, alpha=0.5)
            axis.set_xticks(range(len(levels)), [f"{level:g}" for level in levels])
    left.plot([1, 2], [1, 2], color="0.5", linewidth=1)
    left.set(xlabel="speed-up over sync, replay of the trace", ylabel="speed-up over sync, closed form")
    left.legend(frameon=False)
    middle.set(xlabel="log-deviation of trajectory durations", ylabel="difference, %")
    right.set(xlabel="learner time / rollout time", ylabel="difference, %")
    figure.suptitle(
        f"simulated: {result.configurations} configurations, mean difference {100 * result.mean_rel_diff:.2f} %, "
        f"greatest {100 * result.max_rel_diff:.1f} %"
    )
    _save(figure, path)


def draw_timeline(trace: UpdateTrace, results: Sequence[ReplayResult], path: Path) -> None:
    """A panel a schedule on one time axis: share of trajectories still running above, cells below, idle hatched."""
    figure, axes = plt.subplots(
        len(results), 1, figsize=(11, 1.7 * len(results) + 0.6), sharex=True, layout="constrained", squeeze=False
    )
    ends = sorted(a.lost_s if a.lost_s is not None else a.completed_s for a in trace.attempts)
    for axis, result in zip(axes[:, 0], results, strict=True):
        running = [1.0 - i / len(ends) for i in range(len(ends) + 1)]
        axis.step([0.0, *ends], running, where="post", color="#d98c00", linewidth=1)
        axis.fill_between([0.0, *ends], running, step="post", color="#f5b942", alpha=0.8)
        cells = 1 + max((s.cell for s in result.spans), default=0)
        learned = result.rollout_s + result.tail_s
        for cell in range(cells):
            spans = [s for s in result.spans if s.cell == cell]
            line = {"bottom": -0.9 - cell, "height": 0.7, "align": "edge"}
            axis.bar([0.0], width=[learned], color="white", edgecolor="0.7", hatch="////", linewidth=0, **line)
            widths = [s.end_s - s.start_s for s in spans]
            axis.bar([s.start_s for s in spans], width=widths, color="#4a7fb5", **line)
        title = f"{result.schedule}: {result.step_wall_s:.2f} s"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set(yticks=[0.5, -0.55], yticklabels=["rollout", "learner"], ylim=(-0.1 - cells, 1.05))
        axis.axvspan(learned, result.step_wall_s, color="#7f6fb0", alpha=0.5)
        axis.axvline(result.rollout_s, color="0.3", linewidth=0.8, linestyle=":")
    axes[-1, 0].set(
        xlabel="seconds from the first request (simulated); dotted: last reward; violet: step and publication"
    )
    _save(figure, path)


def draw_sagc(result: SagcResult, path: Path) -> None:
    """A row a stream: rates against the target, walls, and the controller's size and multiplier over the updates."""
    rows = result.comparisons
    figure, axes = plt.subplots(len(rows), 3, figsize=(14, 2.5 * len(rows) + 0.6), layout="constrained", squeeze=False)
    for (left, middle, right), found in zip(axes, rows, strict=True):
        names = [line.policy for line in found.lines]
        colors = ["#9aa5b1"] * (len(names) - 1) + ["#1f77b4"]
        left.bar(names, [line.straggler_rate for line in found.lines], color=colors)
        left.axhline(found.target_rate, color="#c0504d", linewidth=1.2, linestyle="--")
        left.set(ylim=(0, 1), ylabel="groups with a straggler")
        left.set_title(f"{found.name}; dashed: target {found.target_rate:g}", loc="left", fontsize=9)
        bars = middle.bar(names, [line.wall for line in found.lines], color=colors)
        middle.bar_label(bars, [f"log2 G {line.utility:.2f}" for line in found.lines], fontsize=8)
        middle.set(ylabel="wall / fixed 16", ylim=(0, 1.25 * max(line.wall for line in found.lines)))
        updates = range(len(found.course.sizes))
        right.step(updates, found.course.sizes, color="#1f77b4", linewidth=0.7, where="post")
        right.set(yscale="log", yticks=[4, 8, 16], yticklabels=["4", "8", "16"], ylabel="size", xlabel="update")
        right.minorticks_off()
        twin = right.twinx()
        twin.plot(updates, found.course.multipliers, color="#d98c00", linewidth=1)
        twin.set_ylabel("multiplier", color="#d98c00")
    figure.suptitle(f"simulated: group sizes on streams of lengths, {result.seeds} seeds; course of the first")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
