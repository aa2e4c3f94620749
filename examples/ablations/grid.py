#!/usr/bin/env python
"""Run every point of a W&B grid sweep on this machine, one after the other, without a W&B server.

    python examples/ablations/grid.py examples/ablations/schedule_objective_group.yaml [--list] [SETTINGS ...]

The points are those `wandb agent` would be given, the command is the sweep's own. SETTINGS go to every trial, e.g.
`--run.updates 4`. At the end a table of medians (the first updates are warm-up). Exit status 1 when a trial failed.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from trial import SWEEP, name_of

from megathunder.config.load import load_config
from megathunder.metrics.row import read_rows

Point = dict[str, object]
WARM_UP = 4


def points(sweep: dict) -> list[Point]:
    """Every combination, the last parameter varying fastest."""
    named = {name: given.get("values", [given.get("value")]) for name, given in sweep["parameters"].items()}
    return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


def command(sweep: dict, point: Point) -> list[str]:
    """The sweep's command at one point, as `wandb agent` expands it."""
    arguments = [f"--{name}={value}" for name, value in point.items()]
    expanded = {
        "${env}": [],
        "${interpreter}": [sys.executable],
        "${program}": [sweep["program"]],
        "${args}": arguments,
    }
    return [part for word in sweep["command"] for part in expanded.get(word, [word])]


def summary(runs: dict[str, Path]) -> Table:
    """Medians of the updates after the warm-up, a row a trial."""
    table = Table("trial", "step wall s", "tail s", "reward, last", "held-out", title="medians")
    for name, folder in runs.items():
        rows = read_rows(folder / "metrics.jsonl")
        if not rows:
            table.add_row(name, "failed")
            continue
        steady = rows[WARM_UP:] or rows
        heldout = next((f"{r.success_heldout:.3f}" for r in reversed(rows) if r.success_heldout is not None), "–")
        times = (f"{median(getattr(r, field) for r in steady):.3f}" for field in ("step_wall_s", "tail_s"))
        table.add_row(name, *times, f"{median(r.reward_mean for r in rows[-4:]):.3f}", heldout)
    return table


def main(argv: list[str]) -> int:
    """Run (or with --list print) every trial."""
    sweep = yaml.safe_load(Path(argv[0]).read_text())
    settings = [a for a in argv[1:] if a != "--list"]
    os.environ[SWEEP] = Path(argv[0]).stem
    runs: dict[str, Path] = {}
    failed = []
    for point in points(sweep):
        words = [*command(sweep, point), *settings]
        print(" ".join(words), flush=True)
        if "--list" in argv:
            continue
        arguments = words[words.index(sweep["program"]) + 1 :]
        name = name_of(arguments)
        runs[name] = Path(load_config(arguments).run.folder) / name
        if subprocess.run(words, check=False).returncode:
            failed.append(name)
    if runs:
        Console().print(summary(runs))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
