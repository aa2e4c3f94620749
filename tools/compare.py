#!/usr/bin/env python
"""Compare schedules live on the same work: `tools/compare.py --config C --schedules sync,thundersync --json OUT`.

One run takes blocks of updates under each schedule in turn (A A | B B | B B | A A ...): same prompts, sampling seeds
and weights, so the schedules see the same trajectories. The first update of a block is a warm-up and is left out.
Written: OUT (every number), a timeline of each schedule beside it (PNG), a table on the terminal.
Further arguments are settings of the run, e.g. --rollout.max_concurrent 8.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from megathunder.config.toml import read_config
from megathunder.errors import UserError
from megathunder.metrics.comparison import Comparison, compare
from megathunder.metrics.folder import RunFolder
from megathunder.metrics.spans import Span, read_spans
from megathunder.metrics.timeline import draw_timeline

SCHEDULES = ("sync", "periodic_async", "thundersync", "one_step_off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Compare schedules live on the same work."""

    config: Path
    """TOML file of the workload, e.g. examples/overlap_grpo.toml."""
    schedules: str = "sync,thundersync"
    """Comma list of schedules; the first is what speed-ups are measured against if `sync` is not among them."""
    repeats: int = 5
    """Measured updates of each schedule."""
    json: Path = Path("runs/compare.json")
    """File that receives every number; a figure is written beside it."""
    warmup: int = 1
    """Updates of a block before the one that is measured."""
    nproc: int = 1
    """Learner ranks."""
    folder: Path = Path("runs")
    """Parent of the run's folder."""


def main(argv: list[str]) -> int:
    """Run, compare, write; the exit status."""
    arguments, rest = tyro.cli(Arguments, args=argv, return_unknown_args=True, description=__doc__)
    try:
        names = schedule_names(arguments.schedules)
        folder = run(arguments, names, list(rest))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: the run ended with status {error.returncode}; its lines above say why", file=sys.stderr)
        return 1
    comparison = compare(folder, names, warmup=arguments.warmup, block=arguments.warmup + 1)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(comparison.as_table(), indent=2) + "\n")
    show(comparison)
    figures = draw(folder, comparison, arguments.json)
    print(f"numbers: {arguments.json}   figures: {', '.join(map(str, figures))}   run: {folder.path}")
    return 0


def schedule_names(text: str) -> tuple[str, ...]:
    """The schedules named, each once."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in SCHEDULES]
    if unknown or not names or len(set(names)) != len(names):
        raise UserError(
            f"--schedules {text!r}", expected=f"different names of {', '.join(SCHEDULES)}", remedy="mend the list"
        )
    return names


def run(arguments: Arguments, names: tuple[str, ...], settings: list[str]) -> RunFolder:
    """Take every block in one run; CalledProcessError when it fails."""
    name = f"compare_{arguments.config.stem}"
    block = arguments.warmup + 1
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.nproc)]
    command += [str(Path(__file__).parent / "train.py"), "--config", str(arguments.config)]
    command += ["--run.name", name, "--run.folder", str(arguments.folder), "--run.overwrite", "true"]
    command += ["--run.updates", str(arguments.repeats * len(names) * block), "--run.evaluate_every", "0"]
    command += ["--run.alternate", *names, "--run.alternate_block", str(block), "--run.record_gradients", "true"]
    command += ["--metrics.report_every", "0", *settings]
    subprocess.run(command, check=True)
    folder = RunFolder((arguments.folder / name).absolute())
    read_config(folder.config)
    return folder


def draw(folder: RunFolder, comparison: Comparison, beside: Path) -> list[Path]:
    """The timeline of each schedule's last measured update, one PNG each."""
    spans = read_spans(folder.events)
    drawn = []
    for name, rows in comparison.measured.items():
        path = beside.with_name(f"{beside.stem}_{name}.png")
        if draw_timeline([s for s in spans if _until(s, rows[-1].update)], path, updates=1, title=name):
            drawn.append(path)
    return drawn


def _until(span: Span, update: int) -> bool:
    """Whether the span belongs to `update` or an earlier one, as far as it says."""
    return span.update is None or span.update <= update


def show(comparison: Comparison) -> None:
    """The table a person reads."""
    table = Table(title="medians over the measured updates", title_justify="left")
    for heading in ("schedule", "step s", "speed-up", "rollout", "tail", "suffix", "busy", "lag", "gradient diff"):
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for row in comparison.rows():
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
