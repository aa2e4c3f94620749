#!/usr/bin/env python
"""Train variants of one configuration over several seeds and compare what they learn, per update and per time.

    python tools/learning_curves.py examples/learning/group_size.yaml --json OUT [--for-s 400] [--only fixed_8,sagc]

The YAML names a configuration, seeds, settings that all runs share ({seed} is the seed) and the variants' own. Runs are
taken one after the other, seed by seed; a run that is finished is left alone, one that has a checkpoint goes on, so the
command may be stopped and given again. With `--for-s` no run begins after so many seconds, with 0 none at all. Then the
JSON and a figure beside it are made of every run that has an evaluation, finished or not.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
import yaml
from rich.console import Console
from rich.table import Table

from megathunder.checkpoint.folder import newest
from megathunder.config.toml import read_config
from megathunder.coordinator.job import JobFailed, run_job
from megathunder.errors import UserError
from megathunder.metrics.folder import RunFolder
from megathunder.metrics.learning import Curves, curve_of, draw_learning, summarise
from megathunder.metrics.output import output_file
from megathunder.metrics.row import read_rows

NAMES = {"config", "seeds", "settings", "variants"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Compare variants by what they learn."""

    comparison: tyro.conf.Positional[Path]
    """YAML file: config, seeds, settings, variants."""
    json: Path = Path("runs/learning_curves.json")
    """File that receives every number; a figure is written beside it."""
    folder: Path = Path("runs")
    """Parent of the runs' folders."""
    for_s: float = float("inf")
    """No run begins after this time; 0: only read what is there."""
    only: str = ""
    """Comma list of variants; empty: all."""
    nproc: int = 1
    """Learner ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of the comparison."""

    variant: str
    seed: int
    name: str
    settings: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Train what is left, read what is there; the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    try:
        file, jobs = read_comparison(arguments.comparison, arguments.only)
        output_file(arguments.json)
        start = time.monotonic()
        for job in jobs:
            if time.monotonic() - start < arguments.for_s:
                take(job, file, arguments)
        report(jobs, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_comparison(file: Path, only: str) -> tuple[Path, list[Job]]:
    """The configuration and the jobs, all variants of a seed together."""
    try:
        table = yaml.safe_load(file.read_text()) if file.is_file() else None
    except yaml.YAMLError as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}", expected="YAML", remedy="mend that line") from None
    if not isinstance(table, dict) or set(table) - NAMES or not {"config", "variants"} <= set(table):
        raise UserError(
            f"{file}: {sorted(table) if isinstance(table, dict) else 'no such table'}",
            expected=f"a YAML file with {', '.join(sorted(NAMES))}",
            remedy="write one like examples/learning/group_size.yaml",
        )
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(table["variants"])
    if missing := [name for name in wanted if name not in table["variants"]]:
        raise UserError(
            f"--only {only!r}: no variant {', '.join(missing)}",
            expected=f"some of {', '.join(table['variants'])}",
            remedy="name those of the file",
        )
    common, seeds = str(table.get("settings") or ""), table.get("seeds", [0])
    if not isinstance(seeds, list):
        raise UserError(f"{file}: seeds: {seeds!r}", expected="a list", remedy=f"write seeds: [{seeds}]")
    jobs = [
        Job(
            variant=variant,
            seed=seed,
            name=f"{file.stem}_{variant}_s{seed}",
            settings=tuple(f"{common} {table['variants'][variant] or ''}".replace("{seed}", str(seed)).split()),
        )
        for seed in seeds
        for variant in wanted
    ]
    return _config(file, table["config"]), jobs


def _config(file: Path, name: str) -> Path:
    """Where the configuration `name` of comparison `file` lies: here, beside the file, or in this project."""
    places = [Path(name), file.parent / name, Path(__file__).resolve().parent.parent / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UserError(
            f"{file}: config {name!r} is no file",
            expected=f"one of {', '.join(map(str, places))}",
            remedy="name a TOML file relative to the working directory or to the comparison",
        )
    return found


def take(job: Job, config: Path, arguments: Arguments) -> None:
    """Train `job` to its end, from where it stands."""
    folder = RunFolder(arguments.folder.absolute() / job.name)
    if folder.policy.is_dir():
        return
    begun = folder.checkpoints.is_dir() and newest(folder.checkpoints, print) is not None
    settings = read_config(config)
    run = dataclasses.replace(
        settings.run, name=job.name, folder=str(arguments.folder.absolute()), resume=begun, overwrite=not begun
    )
    run_job(dataclasses.replace(settings, run=run), ranks=arguments.nproc, settings=job.settings)


def report(jobs: list[Job], arguments: Arguments) -> None:
    """Write and show what the runs have learnt so far."""
    read = ((job, read_rows(RunFolder(arguments.folder / job.name).metrics)) for job in jobs)
    curves = [curve for job, rows in read if rows and (curve := curve_of(job.variant, job.seed, rows))]
    if not curves:
        raise UserError(
            f"no run of {arguments.comparison} in {arguments.folder} has an evaluation",
            expected="runs with run.evaluate_every > 0",
            remedy="let the command train: leave out --for-s",
        )
    found = summarise(curves)
    arguments.json.write_text(json.dumps(asdict(found), indent=1) + "\n")
    draw_learning(found, arguments.json.with_suffix(".png"))
    show(found)


def show(found: Curves) -> None:
    """A row a variant."""
    at = f"held-out at {found.time_s:.0f} s"
    table = Table("variant", "seeds", "held-out, last", at, "training s", title="mean (least to greatest) over seeds")
    for line in found.summaries:
        last, same = (f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in (line.last, line.at_one_time))
        table.add_row(line.variant, str(line.seeds), last, same, f"{line.wall_s:.0f}")
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
