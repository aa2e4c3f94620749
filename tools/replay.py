#!/usr/bin/env python
"""Replay a recorded run under any schedule: `tools/replay.py runs/NAME --schedule thundersync --check-against sync`.

The trajectories of the run arrive at their recorded times (scaled, shuffled, with a slower verifier) at the scheduler
and the loop of a live run, and the real learner works on them: no engine, no sandbox. The policy is the run's first
model in every update, so engine and learner log-probabilities agree only where that model sampled.
With --check-against, each update runs under both schedules and the gradients, and the weights after one real step, are
compared by kind of parameter (benchmarks/comparison/differences.py says why weights are compared by norm).
Updates in which no group
has different rewards have a gradient of 0 under every schedule: where all are such, the check has not passed.
Exit status: 0, 1 above the tolerance, for a failed job or on SIGTERM, 2 for a setting to mend or a check that had
nothing to compare, 130 interrupted.
Further arguments are settings of the run, e.g. --learner.accumulator exact.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation, Recording, alternation_of, tensor_file
from benchmarks.comparison.differences import Differences, differences, worst
from benchmarks.comparison.job import JobFailed, JobStopped, replay_config, run_job
from benchmarks.comparison.replayed_rollouts import read_recorded
from megathunder.config import Config
from megathunder.errors import UserError
from megathunder.metrics.output_file import output_file
from megathunder.metrics.row import MetricsRow, read_rows
from megathunder.metrics.run_folder import RunFolder
from megathunder.simulator.variant import Variant

console = Console(highlight=False)
console.width = max(console.width, 120)  # a file has no width of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Replay a recorded run under any schedule."""

    run: tyro.conf.Positional[Path]
    """Folder of the recorded run (runs/NAME)."""
    schedule: str = "thundersync"
    """sync, periodic_async, thundersync or one_step_off."""
    release: str = ""
    """trajectory, turn or turn_forward; empty: as the run had it."""
    content_ready: bool = False
    """Differentiate trajectories before their rewards are known."""
    check_against: str = ""
    """Compare gradients and weights with those of this schedule, e.g. sync."""
    tolerance: float = 1e-5
    """Largest relative difference that --check-against lets pass."""
    shuffle_arrivals: int = 0
    """Exchange the release times of an update's trajectories at random, with this seed; 0: as recorded."""
    speed: float = 1.0
    """Divide recorded times by this."""
    verifier_s: float = 0.0
    """Seconds added to every reward."""
    updates: tuple[int, ...] = ()
    """Recorded updates to replay; empty: all."""
    nproc: int = 1
    """Learner ranks."""
    folder: Path = Path("runs")
    """Parent of the folders that the replay writes."""
    json: Path | None = None
    """File that receives rows and differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What --check-against found in `updates` updates, of which `zero_updates` have a gradient of 0 under both.
    `gradient` is of the others; None: there are none. `weights` are those after the first real step; None: no update
    takes one, because `no_step`."""

    against: str
    updates: int
    zero_updates: int
    gradient: Differences | None
    weights: Differences | None
    no_step: str = ""

    @property
    def largest(self) -> float:
        """What the tolerance is for."""
        gradient = self.gradient.largest if self.gradient else 0.0
        return max(gradient, self.weights.largest_norm if self.weights else 0.0)


def main(argv: list[str]) -> int:
    """Replay, compare, report; the exit status."""
    arguments, rest = tyro.cli(Arguments, args=argv, return_unknown_args=True, description=__doc__)
    try:
        variant = Variant.parse(variant_name(arguments))
        names = (Variant.parse(arguments.check_against).name, variant.name) if arguments.check_against else ()
        config, recording = replayed(arguments)
        if arguments.json:
            output_file(arguments.json)
        first = variant.apply(config)
        alternation = Alternation(recording=recording)
        if names:
            first = dataclasses.replace(
                config, run=dataclasses.replace(config.run, updates=config.run.updates * len(names))
            )
            alternation = Alternation(schedules=names, recording=recording, keep=("gradients",))
        folder = run_job(first, ranks=arguments.nproc, settings=rest, alternation=alternation)
        check = compare(arguments, config, folder, names, rest) if names else None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except JobStopped as stop:
        rows = f"; rows of replayed updates are in {stop.folder.metrics}" if stop.folder else ""
        print(f"{stop}: the replay is not complete and nothing was concluded from it{rows}", file=sys.stderr)
        return stop.status(kept=False)
    rows = read_rows(folder.metrics)
    show(rows, check)
    if arguments.json:
        write(arguments.json, rows, check)
    return 0 if check is None else verdict(check, arguments)


def verdict(check: Check, arguments: Arguments) -> int:
    """The exit status of a check; says so where it had nothing to compare."""
    if check.gradient or check.largest > arguments.tolerance:
        return 0 if check.largest <= arguments.tolerance else 1
    weights = "" if check.weights else f", and no weights: no update takes a step ({check.no_step})"
    error = UserError(
        f"no gradient was compared: those of all {check.updates} updates of {arguments.run} are 0 under both "
        f"schedules{weights}",
        expected="an update in which a group has different rewards",
        remedy="replay other updates (--updates), or a run in which some attempts at a task succeed and some do not",
    )
    print(f"error: {error}", file=sys.stderr)
    return 2


def variant_name(arguments: Arguments) -> str:
    """`thundersync/turn_forward+content_ready` from the separate options."""
    release = f"/{arguments.release}" if arguments.release else ""
    return f"{arguments.schedule}{release}{'+content_ready' if arguments.content_ready else ''}"


def replayed(arguments: Arguments) -> tuple[Config, Recording]:
    """The settings of the replay, one pass over the recorded updates, and what it takes from the recording."""
    recording = Recording(
        run=str(arguments.run.absolute()),
        updates=arguments.updates,
        speed=arguments.speed,
        shuffle_seed=arguments.shuffle_arrivals,
        verifier_s=arguments.verifier_s,
    )
    count = len(read_recorded(arguments.run, arguments.updates))
    folder = str(arguments.folder.absolute())
    config = replay_config(arguments.run, name=f"replay_{arguments.run.name}", folder=folder, updates=count)
    return config, recording


def compare(arguments: Arguments, config: Config, folder: RunFolder, names: tuple[str, ...], rest: list[str]) -> Check:
    """Gradients of the job that `folder` holds; weights after the first update that steps, under each of `names`."""
    alternation = alternation_of(folder.path)
    plan = AlternatingUpdates(config, alternation)
    files: dict[int, dict[str, Path]] = {}
    for update in range(config.run.updates * len(names)):
        spec = plan.spec(update)
        files.setdefault(spec.batch, {})[spec.name] = tensor_file(folder.path, "gradients", update)
    pairs = [differences(pair[names[0]], pair[names[1]]) for pair in files.values()]
    compared = [pair for pair in pairs if pair.by_kind]
    check = Check(
        against=names[0],
        updates=len(pairs),
        zero_updates=len(pairs) - len(compared),
        gradient=worst(compared) if compared else None,
        weights=None,
    )
    rows = read_rows(folder.metrics)
    steps = min((plan.spec(row.update).batch for row in rows if row.stepped), default=None)
    if steps is None:
        return dataclasses.replace(check, no_step="; ".join(sorted({row.skip_reason for row in rows})))
    weights = []
    for number, name in enumerate(names):
        run = dataclasses.replace(config.run, name=f"{config.run.name}_step{number}", updates=steps + 1)
        job = Variant.parse(name).apply(dataclasses.replace(config, run=run))
        real = Alternation(recording=alternation.recording, learn=True, keep=("weights",))
        taken = run_job(job, ranks=arguments.nproc, settings=rest, alternation=real)
        weights.append(tensor_file(taken.path, "weights", steps))
    return dataclasses.replace(check, weights=differences(*weights))


def show(rows: list[MetricsRow], check: Check | None) -> None:
    """The tables a person reads."""
    table = Table("update", "schedule", "step s", "rollout s", "tail s", "busy", "wasted", "lag", title="replayed")
    for row in rows:
        times = (f"{value:.3f}" for value in (row.step_wall_s, row.rollout_s, row.tail_s))
        shares = (f"{value:.0%}" for value in (row.learner_busy_share, row.wasted_share))
        table.add_row(str(row.update), row.schedule, *times, *shares, str(row.policy_lag_max))
    console.print(table)
    if check is None:
        return
    headings = ("kind of parameter", "gradient", "weights, norm", "weights, largest element")
    table = Table(*headings, title=f"relative difference to {check.against}; gradient: largest element")
    gradient, weights = check.gradient or Differences(), check.weights or Differences()
    columns = (gradient.by_kind, weights.by_norm, weights.by_kind)
    for kind in sorted(gradient.by_kind | weights.by_kind):
        table.add_row(kind, *(f"{column[kind]:.1e}" if kind in column else "-" for column in columns))
    if table.rows:
        console.print(table)
    if check.gradient and check.zero_updates:
        console.print(
            f"gradients of {check.zero_updates} of {check.updates} updates are 0 under both schedules (no group has "
            "different rewards): of these nothing was compared"
        )
    if check.gradient and check.weights is None:
        console.print(f"no recorded update takes a step ({check.no_step}): weights were not compared")
    found = {"gradients": check.gradient, "weights": check.weights}
    same = ", ".join(f"{name} {known.identical}" for name, known in found.items() if known)
    if same:
        console.print(f"byte-identical: {same}")


def write(file: Path, rows: list[MetricsRow], check: Check | None) -> None:
    """Rows and differences as JSON."""
    found = None if check is None else asdict(check) | {
        "gradient_max_rel_diff": check.gradient.largest if check.gradient else None,
        "weights_norm_rel_diff": check.weights.largest_norm if check.weights else None,
        "weights_max_rel_diff": check.weights.largest if check.weights else None,
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": msgspec.to_builtins(rows, str_keys=True), "check": found}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
