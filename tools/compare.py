#!/usr/bin/env python
"""Compare schedules on the same work, live or from a recorded run, in one run that alternates them.

    tools/compare.py --config C --schedules sync,thundersync --json OUT               live: engines and learner
    tools/compare.py --mode replay --run runs/NAME --schedules sync,thundersync ...   recorded trajectories and times

Blocks of updates run under each schedule in turn (A A | B B | B B | A A ...): same prompts, sampling seeds and weights
(or the same recorded trajectories), so all see the same work. The first update of a block is a warm-up and left out.
A schedule may name a release: thundersync/turn_forward, thundersync+content_ready, thundersync+no_verifier.
Written: OUT (every number, the trace-predicted speed-up beside the measured one), a figure of all schedules beside it.
Further arguments are settings of the run, e.g. --rollout.max_concurrent 8.
On SIGTERM or Ctrl-C the rounds that every schedule has ended are written and shown; a comparison cannot be resumed.
Exit status: 0 done, or stopped by SIGTERM with numbers kept; 1 failed, or stopped with none; 2 a setting must be
mended; 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.comparison.alternation import Alternation, Recording
from benchmarks.comparison.comparison import BASE, Comparison, compare
from benchmarks.comparison.job import JobFailed, JobStopped, replay_config, run_job
from benchmarks.comparison.machine import independence, processor
from megathunder.config import Config
from megathunder.config.load import load_config
from megathunder.errors import UserError
from megathunder.metrics.output_file import output_file
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.spans import read_spans
from megathunder.report.timeline import draw_schedules
from megathunder.simulator.interference import Interference
from megathunder.simulator.predict import predict
from megathunder.simulator.recorded import read_recorded_run
from megathunder.simulator.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Compare schedules on the same work."""

    mode: Literal["live", "replay"] = "live"
    """`live` samples with engines; `replay` takes the trajectories and release times of a recorded run."""
    config: Path | None = None
    """live: TOML file of the workload, e.g. examples/overlap_grpo.toml."""
    run: Path | None = None
    """replay: folder of the recorded run."""
    schedules: str = "sync,thundersync"
    """Comma list; speed-ups are against `sync`, or against the first if it is not among them."""
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
    speed: float = 1.0
    """replay: recorded times are divided by this."""
    verifier_s: float = 0.0
    """replay: seconds added to every reward, but for schedules with +no_verifier."""
    shuffle_arrivals: int = 0
    """replay: exchange release times at random with this seed; 0: as recorded."""
    updates: tuple[int, ...] = ()
    """replay: recorded updates to take; empty: all."""


def main(argv: list[str]) -> int:
    """Run, compare, write; the exit status."""
    arguments, rest = tyro.cli(Arguments, args=argv, return_unknown_args=True, description=__doc__)
    try:
        names = schedule_names(arguments.schedules)
        output_file(arguments.json)
        config, alternation = comparison_config(arguments, names)
        folder = run_job(config, ranks=arguments.nproc, settings=rest, alternation=alternation)
        report(folder, names, arguments, cores_at_once(folder.read_config()) if arguments.mode == "live" else None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except JobStopped as stop:
        return keep(stop, names, arguments)
    return 0


def keep(stop: JobStopped, names: tuple[str, ...], arguments: Arguments) -> int:
    """Report the rounds that were measured before the comparison was stopped; the exit status."""
    if stop.folder is None:
        print(f"{stop} before the run began: nothing was measured", file=sys.stderr)
        return stop.status(kept=False)
    try:
        rounds = report(stop.folder, names, arguments, None)
    except UserError as error:
        print(f"{stop}: no numbers, since {error.seen}; its rows are in {stop.folder.metrics}", file=sys.stderr)
        return stop.status(kept=False)
    print(
        f"{stop} after {rounds} of {arguments.repeats} measured updates of each schedule: the numbers above are of "
        f"these and are kept in {arguments.json}; a comparison cannot be resumed",
        file=sys.stderr,
    )
    return stop.status(kept=True)


def report(folder: RunFolder, names: tuple[str, ...], arguments: Arguments, reached: float | None) -> int:
    """Write and show what the run in `folder` measured, and what `cores_at_once` did; updates of each schedule."""
    comparison = compare(folder, names, warmup=arguments.warmup, block=arguments.warmup + 1)
    comparison, unforetold = with_prediction(comparison, folder)
    found = {
        "repeats": {"asked": arguments.repeats, "measured": len(comparison.measured[comparison.base])},
        "machine": {"processor": processor(), "independence_of_cores": reached},
    }
    arguments.json.write_text(json.dumps(comparison.as_table() | found, indent=2) + "\n")
    show(comparison, reached)
    if unforetold:
        print(f"no speed-up is predicted: {unforetold}")
    figure = arguments.json.with_suffix(".png")
    last = {name: rows[-1].update for name, rows in comparison.measured.items()}
    drawn = draw_schedules(read_spans(folder.events), last, figure)
    print(f"numbers: {arguments.json}   figure: {figure if drawn else 'none'}   run: {folder.path}")
    return found["repeats"]["measured"]


def schedule_names(text: str) -> tuple[str, ...]:
    """The schedules named, each once."""
    names = tuple(Variant.parse(name.strip()).name for name in text.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise UserError(f"--schedules {text!r}", expected="different names", remedy="name each schedule once")
    return names


def comparison_config(arguments: Arguments, names: tuple[str, ...]) -> tuple[Config, Alternation]:
    """The settings of the one run that takes every block, and the blocks."""
    given, other = (arguments.config, "run") if arguments.mode == "live" else (arguments.run, "config")
    if given is None or getattr(arguments, other) is not None:
        wanted = "--config FILE" if arguments.mode == "live" else "--run FOLDER"
        raise UserError(
            f"--mode {arguments.mode} without {wanted}, or with --{other}",
            expected=f"{wanted} alone",
            remedy="live takes a workload from --config, replay takes a recorded run from --run",
        )
    if arguments.repeats < 1 or arguments.warmup < 0:
        raise UserError(
            f"--repeats {arguments.repeats} --warmup {arguments.warmup}",
            expected="at least one measured update of each schedule, and no fewer than 0 before it",
            remedy="give --repeats 1 or more, --warmup 0 or more",
        )
    recording = None
    if arguments.mode == "live":
        config = load_config(["--config", str(given)])
        if config.rollout.speculation != "off":
            raise UserError(
                f"{given} with rollout.speculation = {config.rollout.speculation!r}",
                expected="servers that do not draft: a schedule would draft from those before it",
                remedy="compare with rollout.speculation = 'off'; run each schedule by itself to measure drafts",
            )
    else:
        recording = Recording(
            run=str(given.absolute()),
            updates=arguments.updates,
            speed=arguments.speed,
            shuffle_seed=arguments.shuffle_arrivals,
            verifier_s=arguments.verifier_s,
        )
        config = replay_config(given)
    block = arguments.warmup + 1
    run = dataclasses.replace(
        config.run,
        name=f"compare_{given.stem}",
        folder=str(arguments.folder.absolute()),
        updates=arguments.repeats * len(names) * block,
        overwrite=True,
        evaluate_every=0,
    )
    metrics = dataclasses.replace(config.metrics, report=False, report_every=0)
    alternation = Alternation(schedules=names, block=block, recording=recording, keep=("gradients",))
    return dataclasses.replace(config, run=run, metrics=metrics), alternation


def cores_at_once(config: Config) -> float | None:
    """`machine.independence` of the cores that rollout and learner are pinned to; None without pins."""
    rollout, learner = config.rollout.cpu_cores, config.learner.cpu_cores
    return None if not rollout or not learner else independence(rollout, learner)


def with_prediction(comparison: Comparison, folder: RunFolder) -> tuple[Comparison, str]:
    """`comparison` with its prediction; as it is, and why, where the run recorded too little to predict from."""
    try:
        return predicted(comparison, folder), ""
    except UserError as error:
        return comparison, error.seen


def predicted(comparison: Comparison, folder: RunFolder) -> Comparison:
    """Speed-ups simulated from sync: release times of its measured updates, costs of its items, which have the machine
    to themselves; what rollout and learner cost each other at once is that of the warm-up updates."""
    variants = [Variant.parse(name) for name in comparison.measured]
    names = [v.name for v in variants if not v.without_verifier]
    whole = folder.read_config().streaming.release == "trajectory"
    if comparison.base != BASE or len(names) < len(comparison.measured) or not whole:
        return comparison  # the others' work is not what sync recorded
    own = {row.update for row in comparison.measured[BASE]}
    every = {row.update for rows in comparison.measured.values() for row in rows}
    recorded = read_recorded_run(
        folder,
        trace=lambda row: row.update in own,
        cost=lambda row: row.update in own,
        warm_up=lambda row: row.update not in every,
    )
    found = [
        predict(
            recorded.config, recorded.updates, recorded.costs, cells=recorded.cells, schedules=names, interference=both
        ).speedup_vs_sync
        for both in (recorded.interference, Interference())
    ]
    return dataclasses.replace(
        comparison,
        predicted=found[0],
        predicted_alone=found[1],
        interference=dataclasses.asdict(recorded.interference),
    )


def show(comparison: Comparison, reached: float | None) -> None:
    """The table a person reads; `reached` as `cores_at_once` says."""
    table = Table(title="medians over the measured updates; predicted: simulated from the trace", title_justify="left")
    headings = ("schedule", "step s", "speed-up", "predicted", "rollout", "tail", "suffix", "busy", "lag", "gradient")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "schedule" else "right")
    for row in comparison.rows():
        table.add_row(*row)
    console = Console(highlight=False)
    console.width = max(console.width, 120)  # a file has no width of its own
    console.print(table)
    for line in comparison.remarks():
        console.print(line)
    if reached is not None:
        console.print(
            f"machine: {processor()}; when both sides' cores work, they reach {reached:.0%} of their speed alone"
        )
        console.print(f"(measured after the run): no overlap can win more than {2 * min(1.0, reached):.2f} here")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
