#!/usr/bin/env python
"""Train variants of one configuration over several seeds and compare what they learn, per update and per time.

    python benchmarks/learning_curves.py examples/learning/group_size.yaml --json OUT [--for-s 400] [--only
    fixed_8,sagc]

The YAML names a configuration, seeds, settings that all runs share ({seed} is the seed) and the variants' own. Runs are
taken one after the other, seed by seed; a run that is finished is left alone, one that has a checkpoint goes on, so the
command may be stopped and given again. With `--for-s` no run begins after so many seconds, with 0 none at all. Then the
JSON and a figure beside it are made of every run that has an evaluation, finished or not; on SIGTERM and Ctrl-C too.
A folder that holds a run with other settings than those asked for is refused before anything is trained or read.
Exit status: 0 done, or stopped by SIGTERM; 1 a run failed; 2 a setting must be mended; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import tyro
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.comparison.job import JobFailed, JobStopped, run_job
from benchmarks.comparison.learning import Curves, curve_of, draw_learning, summarise
from megathunder.checkpoint.folder import newest
from megathunder.checkpoint.resume import SILENT, changes
from megathunder.config import Config
from megathunder.config.load import load_config
from megathunder.errors import UserError
from megathunder.metrics.output_file import output_file
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder

SHAPES = {
    "config": str,
    "seeds": Annotated[list[int], msgspec.Meta(min_length=1)],
    "settings": str | None,
    "variants": Annotated[dict[str, str | None], msgspec.Meta(min_length=1)],
}
EXPECTED = {
    "config": "the name of a TOML file",
    "seeds": "a list of whole numbers, e.g. [0, 1, 2]",
    "settings": "words of a command line, e.g. --run.updates 24",
    "variants": "a name for each, with words of a command line after it",
}


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
        asked = {job: asked_of(job, file, arguments) for job in jobs}
        for job, config in asked.items():
            refuse_another_run(job, config)
        start = time.monotonic()
        for config in asked.values():
            if time.monotonic() - start < arguments.for_s:
                take(config, arguments.nproc)
        report(jobs, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except JobStopped as stop:
        return keep(stop, jobs, arguments)
    return 0


def keep(stop: JobStopped, jobs: list[Job], arguments: Arguments) -> int:
    """Report what the runs have learnt until they were stopped; the exit status."""
    try:
        report(jobs, arguments)
        told = f"what the runs have learnt so far is in {arguments.json}"
    except UserError as error:
        told = error.seen
    print(f"{stop}: {told}; the same command goes on in {arguments.folder}", file=sys.stderr)
    return stop.status(kept=True)


def read_comparison(file: Path, only: str) -> tuple[Path, list[Job]]:
    """The configuration and the jobs, all variants of a seed together."""
    table = _table(file)
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(table["variants"])
    if missing := [name for name in wanted if name not in table["variants"]]:
        raise UserError(
            f"--only {only!r}: no variant {', '.join(missing)}",
            expected=f"some of {', '.join(table['variants'])}",
            remedy="name those of the file",
        )
    common, seeds = table.get("settings") or "", table.get("seeds", [0])
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


def _table(file: Path) -> dict:
    """What the YAML says, its parts of the types that `SHAPES` names."""
    like = "write one like examples/learning/group_size.yaml"
    try:
        table = yaml.safe_load(file.read_text())
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}", expected="a YAML file", remedy=like) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}", expected="YAML", remedy="mend that line") from None
    if not isinstance(table, dict) or set(table) - set(SHAPES) or not {"config", "variants"} <= set(table):
        raise UserError(
            f"{file}: {', '.join(map(str, table)) if isinstance(table, dict) else 'no names with values'}",
            expected=f"a YAML file with {', '.join(SHAPES)}",
            remedy=like,
        )
    for name, value in table.items():
        try:
            msgspec.convert(value, SHAPES[name])
        except msgspec.ValidationError as error:
            raise UserError(f"{file}: {name}: {value!r} ({error})", expected=EXPECTED[name], remedy=like) from None
    return table


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


def asked_of(job: Job, file: Path, arguments: Arguments) -> Config:
    """Every setting of `job`, resolved as tools/train.py does."""
    config = load_config(["--config", str(file), *job.settings], prog=f"learning_curves.py, variant {job.variant}")
    folder = str(arguments.folder.absolute())
    return dataclasses.replace(config, run=dataclasses.replace(config.run, name=job.name, folder=folder))


def refuse_another_run(job: Job, asked: Config) -> None:
    """Raise UserError where the folder of `job` holds a run that was not made with the settings `asked`: a name says
    nothing of what was trained under it."""
    folder = RunFolder(Path(asked.run.folder) / asked.run.name)
    if not (folder.policy.exists() or folder.checkpoints.exists() or folder.metrics.exists()):
        return
    if not folder.config.is_file():
        seen = f"{folder.path} holds a run without its settings (config.toml)"
    else:
        ignored = {*SILENT} - {"run.updates"}
        others = [found for found in changes(folder.read_config(), asked) if found[0] not in ignored]
        if not others:
            return
        told = "; ".join(f"{name} = {old!r}, and {new!r} is asked for" for name, old, new in others)
        seen = f"{folder.path} holds a run with {told}"
    raise UserError(
        seen,
        expected=f"no run, or one with the settings that {job.variant}, seed {job.seed}, has here",
        remedy="give another --folder, or remove that one to train it anew",
    )


def take(asked: Config, nproc: int) -> None:
    """Train the run `asked` to its end, from where it stands."""
    folder = RunFolder(Path(asked.run.folder) / asked.run.name)
    if folder.policy.is_dir():
        return
    begun = folder.checkpoints.is_dir() and newest(folder.checkpoints, print) is not None
    run = dataclasses.replace(asked.run, resume=begun, overwrite=not begun)
    run_job(dataclasses.replace(asked, run=run), ranks=nproc)


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
