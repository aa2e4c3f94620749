"""Draws the figures of the documentation into docs/figures/: `python docs/make_figures.py`.

processes            who starts whom, and what travels between them                        schematic
accumulators         where a gradient goes while its coefficient is not known               schematic
prefix_cut           keys and values as leaves, deferred gradients coming back              schematic
step_time            step time by schedule, from benchmarks/results/compare_four_schedules.json
memory_by_groups     accumulator bytes of a rank against open groups, from the memory plan
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megathunder.config.load import load_config
from megathunder.config.model_shape import read_model_shape
from megathunder.planning.plan import make_plan
from megathunder.report import plot_style
from megathunder.report.plot_style import FAINT, INK, LEARNER, LEARNER_LIGHT, ROLLOUT, ROLLOUT_LIGHT, SUFFIX, TAIL

ROOT = Path(__file__).resolve().parent.parent
COMPARISON = ROOT / "benchmarks" / "results" / "compare_four_schedules.json"
PLANNED = ("qwen3_30b_a3b_64gpu", "glm45_air_64gpu")
OPEN_GROUPS = (1, 2, 4, 6, 8, 12, 16)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, colour: str, size: int = 9) -> None:
    """A labelled rectangle; (x, y) is its lower left corner."""
    patch = matplotlib.patches.FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0.02", facecolor=colour, edgecolor=FAINT, linewidth=0.8
    )
    axes.add_patch(patch)
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "", colour: str = INK) -> None:
    """An arrow with a word beside its middle."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.1})
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.09)
        axes.text(*middle, text, ha="center", fontsize=8, color=colour)


def blank(axes: Axes, width: float, height: float) -> None:
    """A canvas without axes."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")


def processes(axes: Axes) -> None:
    blank(axes, 12, 5)
    box(axes, 0.2, 3.2, 2.6, 1.4, "SGLang servers\n(CPU or GPU)", ROLLOUT_LIGHT)
    box(axes, 0.2, 0.4, 2.6, 1.4, "sandboxes\n(commands, graders)", ROLLOUT_LIGHT)
    box(
        axes,
        5.3,
        0.9,
        2.6,
        3.4,
        "coordinator\n(asyncio, child of rank 0)\n\nagents, ledger,\nschedule, record",
        "#eef0f3",
    )
    box(
        axes,
        9.2,
        0.9,
        2.6,
        3.4,
        "learner ranks\n(torchrun,\nMegatron-Core)\n\nmodel replicas take\none command at a time",
        LEARNER_LIGHT,
    )
    arrow(axes, (5.3, 3.8), (2.85, 4.1), "token ids")
    arrow(axes, (2.85, 3.6), (5.3, 3.3), "ids, log-probabilities, version")
    arrow(axes, (5.3, 1.6), (2.85, 1.3), "commands")
    arrow(axes, (2.85, 0.8), (5.3, 1.1), "output, reward")
    arrow(axes, (7.95, 3.3), (9.15, 3.3), "rows, folds, step")
    arrow(axes, (9.15, 2.0), (7.95, 2.0), "done")
    axes.annotate(
        "",
        (1.5, 4.65),
        (10.5, 4.35),
        arrowprops={"arrowstyle": "->", "color": TAIL, "lw": 1.3, "connectionstyle": "arc3,rad=.12"},
    )
    axes.text(
        6,
        4.72,
        "weights, once per update; every server acknowledges version and checksum",
        ha="center",
        fontsize=8,
        color=TAIL,
    )


def accumulators(axes: Axes) -> None:
    blank(axes, 12, 4.6)
    rows = (
        ("all rewards known", "direct", "batch += A g", "no memory"),
        (
            "rewards take few values",
            "class",
            "one accumulator per value;  batch += sum A(v) C_v",
            "values x open groups",
        ),
        ("any reward", "moment", "S1 = sum r g,  S0 = sum g;  batch += a S1 + c S0", "2 x open groups"),
        (
            "reward still missing",
            "per trajectory",
            "one accumulator;  folded or dropped when the reward is there",
            "trajectories in grading",
        ),
    )
    for n, (known, name, what, memory) in enumerate(rows):
        y = 3.5 - n * 1.1
        axes.text(0.1, y + 0.4, known, va="center", fontsize=9, color=FAINT)
        box(axes, 2.7, y, 1.7, 0.8, name, LEARNER_LIGHT)
        box(axes, 4.7, y, 5.0, 0.8, what, "#f5f6f8", 8)
        axes.text(9.9, y + 0.4, memory, va="center", fontsize=8, color=FAINT)


def prefix_cut(axes: Axes) -> None:
    blank(axes, 12, 3.6)
    for n, (name, colour) in enumerate(
        (("prompt", "#eef0f3"), ("turn 1", LEARNER_LIGHT), ("output", "#eef0f3"), ("turn 2", LEARNER_LIGHT))
    ):
        box(axes, 0.3 + 2.9 * n, 1.5, 2.3, 0.9, name, colour)
        if n:
            x = 0.3 + 2.9 * n
            arrow(axes, (x - 0.6, 2.15), (x, 2.15), "K, V", LEARNER)
            arrow(axes, (x, 1.75), (x - 0.6, 1.75), "", ROLLOUT)
            axes.text(x - 0.3, 1.35, "dK, dV", ha="center", fontsize=8, color=ROLLOUT)
    axes.text(
        0.3, 3.0, "forward: as each turn arrives; earlier keys and values enter as leaves", fontsize=9, color=LEARNER
    )
    axes.text(
        0.3,
        0.6,
        "backward: latest segment first; deferred gradients are added up and replayed once",
        fontsize=9,
        color=ROLLOUT,
    )


def step_time(axes: Axes) -> None:
    found = json.loads(COMPARISON.read_text())["schedules"]
    parts = (("rollout_s", ROLLOUT, "rollout"), ("tail_s", TAIL, "tail"), ("suffix_s", SUFFIX, "update suffix"))
    for n, (name, row) in enumerate(found.items()):
        left = 0.0
        for key, colour, label in parts:
            width = row[key]["median"]
            axes.barh(n, width, left=left, color=colour, height=0.55, label=label if n == 0 else None)
            left += width
        runs = row["step_wall_s"]["runs"]
        axes.plot([min(runs), max(runs)], [n, n], color=INK, linewidth=1.2)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("step wall time, s (medians of three; line: spread); two CPU cores, balanced workload")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    plot_style.clean(axes)


def memory_by_groups(axes: Axes) -> None:
    for name in PLANNED:
        config = load_config(["--config", str(ROOT / "examples" / f"{name}.toml")])
        shape, sizes = read_model_shape(config.learner.model), []
        for groups in OPEN_GROUPS:
            streaming = dataclasses.replace(config.streaming, max_open_groups=groups)
            plan = make_plan(
                dataclasses.replace(config, streaming=streaming), shape, ranks=config.hardware.learner_ranks
            )
            sizes.append(plan.memory.accumulators / 2**30)
        axes.plot(OPEN_GROUPS, sizes, marker="o", markersize=4, label=name)
    axes.set_xlabel("open groups per model replica")
    axes.set_ylabel("accumulators of a rank, GiB (planned)")
    axes.legend(frameon=False, fontsize=8)
    plot_style.clean(axes)


FIGURES: dict[str, tuple[Callable[[Axes], None], tuple[float, float]]] = {
    "processes": (processes, (9.5, 4.2)),
    "accumulators": (accumulators, (10, 3.6)),
    "prefix_cut": (prefix_cut, (9.5, 2.8)),
    "step_time": (step_time, (8, 2.8)),
    "memory_by_groups": (memory_by_groups, (6.5, 3.4)),
}


def main(folder: Path) -> None:
    """Draw every figure into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (draw, size) in FIGURES.items():
        with plot_style.house_style(), matplotlib.rc_context({"svg.fonttype": "path"}):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure.subplots())
            figure.savefig(folder / f"{name}.svg", format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "figures")
