#!/usr/bin/env python
"""Evaluate policies on tasks they were not trained on: pass@k with confidence intervals, from independent attempts.

    python tools/evaluate.py --checkpoint examples/policies/student --tasks shell --attempts 5 --json out.json
    python tools/evaluate.py --checkpoint runs/mine --tasks examples/tasks/swe --config examples/swe_cpu.toml ...
    python tools/evaluate.py --runs runs/a runs/b --tasks shell --attempts 5 --json out.json       schedules by cost
    python tools/evaluate.py --runs runs/a runs/b --json out.json                                  the same, no engine

--checkpoint  a Hugging Face model folder, or a run folder that holds `policy/`
--tasks       shell, math, or a file or folder of tasks (SWE-smith, SWE-bench, Harbor, Terminal-Bench 1, SETA)
--attempts    attempts a task (default 5);  --k 1,3,5: for which k
--json        the result; finished attempts are kept beside it in OUT.attempts.jsonl and are not made again
--runs        runs to compare: what each policy at a fixed cadence (run.export_every, and the one they began with)
              scores against GPU-hours or machine-hours of training; a figure is written beside OUT. Without --tasks
              the evaluations that the runs made themselves are compared (run.evaluate_every). Runs that are scored on
              different tasks, or under different sampling settings, are refused
--target      the pass@k to be reached (default: the highest that every run reaches);  --budget-hours: to score at
              (default: the hours of the shortest run)
Everything else is a setting as in tools/train.py: --config FILE, --tasks.heldout N, --rollout.urls URL, ...
Exit status: 0 done, 1 failed, 2 a setting must be mended, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from megathunder.config import Config, sandbox_laws
from megathunder.config.bounds import numbers_are_in_range
from megathunder.config.load import load_config
from megathunder.config.machine import ports_are_free, the_tasks_are_there
from megathunder.config.models import model_folder_is_whole
from megathunder.errors import INTERRUPTED, ConfigError, MegathunderError, UserError
from megathunder.evaluation import AttemptLog, Score, score
from megathunder.evaluation.alike import refuse_unlike, scored_now, scored_then
from megathunder.evaluation.cadence import Comparison, Curve, Evaluation, compare, read_evaluations, shared_ks
from megathunder.evaluation.estimate import Estimate
from megathunder.evaluation.session import missing, open_session, plan_of
from megathunder.metrics.costs import Panel, Series, draw_costs
from megathunder.metrics.folder import RunFolder, open_folder
from megathunder.metrics.output import output_file
from megathunder.metrics.row import read_rows
from megathunder.tasks import Task, heldout_tasks

GENERATED = ("shell", "math")
LAWS = (numbers_are_in_range, *sandbox_laws.ALL, the_tasks_are_there, ports_are_free)
LEAST_SAMPLING = 1e-3  # below this temperature attempts are copies of each other


def main(argv: list[str]) -> int:
    """Run, print the table and write the JSON file."""
    options, settings = read_arguments(argv)
    out = Path(options.json)
    try:
        ks = read_ks(options.k, options.attempts)
        output_file(out)
        if options.runs:
            compare_runs(options, settings, ks, out)
        else:
            config = prepared(load_config(settings, prog="evaluate.py"), options)
            folder = policy_folder(Path(options.checkpoint))
            asked = Asked(config=config, tasks=heldout(config, options.tasks), policies=(folder,))
            logs = attempt_logs(asked, [out])
            (result,) = asyncio.run(scores(asked, logs, options.attempts, ks, out.parent / "logs"))
            plan = {"policy": str(folder), "named": options.tasks, "plan": plan_of(config, folder, asked.tasks)}
            content = plan | msgspec.to_builtins(result)
            out.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
            show(result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: finished attempts are kept beside {out}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 0


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options of this tool, settings)"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint")
    what.add_argument("--runs", nargs="+", type=Path)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--attempts", type=int, default=5)
    parser.add_argument("--k", default="1,3,5")
    parser.add_argument("--target", type=float)
    parser.add_argument("--budget-hours", type=float)
    parser.add_argument("--json", required=True)
    options, settings = parser.parse_known_args(argv)
    if options.checkpoint and not options.tasks:
        options.tasks = "shell"
    return options, settings


def prepared(config: Config, options: argparse.Namespace) -> Config:
    """`config` with the tasks that --tasks names, checked."""
    config = with_tasks(config, options.tasks)
    check_independence(config, options.attempts)
    for law in LAWS:
        law(config)
    return config


def with_tasks(config: Config, named: str) -> Config:
    """`config` with the task source that --tasks names."""
    path = Path(named)
    if named in GENERATED:
        source, named = named, config.tasks.path if named == "math" else ""
    elif not path.exists():
        raise ConfigError(
            f"--tasks {named}: no such file or folder",
            expected=f"{', '.join(GENERATED)}, or a path",
            remedy="name examples/tasks/swe or examples/tasks/terminal, for example",
        )
    else:
        source = "terminal" if any(path.glob("**/task.toml")) or any(path.glob("**/task.yaml")) else "swe"
        named = str(path.absolute())
    return dataclasses.replace(config, tasks=dataclasses.replace(config.tasks, source=source, path=named))


def heldout(config: Config, named: str) -> list[Task]:
    """The tasks to evaluate on."""
    tasks = heldout_tasks(config.tasks, config.tasks.heldout)
    if not tasks:
        raise ConfigError(
            f"{named} has no held-out tasks",
            expected="at least one (dev.jsonl, dev/, or several repositories)",
            remedy="split them with tools/prepare_data.py",
        )
    return tasks


def policy_folder(checkpoint: Path) -> Path:
    """The model folder of a checkpoint."""
    for folder in (checkpoint, checkpoint / "policy"):
        if (folder / "config.json").is_file():
            model_folder_is_whole(str(folder), "--checkpoint")
            return folder.absolute()
    raise ConfigError(
        f"--checkpoint {checkpoint} holds neither config.json nor policy/config.json",
        expected="a Hugging Face model folder, or the folder of a finished run",
        remedy="name examples/policies/student, or convert with tools/convert.py",
    )


def read_ks(text: str, attempts: int) -> list[int]:
    """The k of pass@k that `attempts` allow."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if attempts < 1 or not words or not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--attempts {attempts} --k {text}",
            expected="at least one attempt, and a comma list of whole numbers above 0",
            remedy="for example --attempts 5 --k 1,3,5",
        )
    return [k for k in map(int, words) if k <= attempts]


def check_independence(config: Config, attempts: int) -> None:
    """Attempts must be draws."""
    if attempts > 1 and config.rollout.temperature < LEAST_SAMPLING:
        raise ConfigError(
            f"--attempts {attempts} with rollout.temperature = {config.rollout.temperature}",
            expected="a temperature at which attempts differ: pass@k is about independent draws",
            remedy="set --rollout.temperature 1.0, or --attempts 1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be evaluated: model folders of one architecture, on tasks, with settings."""

    config: Config
    tasks: list[Task]
    policies: tuple[Path, ...]


def attempt_logs(asked: Asked, outs: Sequence[Path]) -> list[AttemptLog]:
    """The attempts at each policy, kept beside `outs`; raises UserError where they are those of another evaluation."""
    return [
        AttemptLog(out.with_name(f"{out.name}.attempts.jsonl"), plan_of(asked.config, folder, asked.tasks))
        for folder, out in zip(asked.policies, outs)
    ]


async def scores(
    asked: Asked, logs: Sequence[AttemptLog], attempts: int, ks: list[int], server_logs: Path
) -> list[Score]:
    """The score of each policy; they share the servers."""
    tasks = asked.tasks
    left = [missing(tasks, attempts, log) for log in logs]
    for folder, count in zip(asked.policies, left):
        kept = len(tasks) * attempts - count
        print(f"{folder}: {len(tasks)} tasks, {attempts} attempts each: {count} to make, {kept} kept", flush=True)
    todo = [(folder, log) for folder, log, count in zip(asked.policies, logs, left) if count]
    if todo:
        async with open_session(asked.config, todo[0][0], server_logs) as session:
            for number, (folder, log) in enumerate(todo):
                if number:
                    await session.load(folder, number)
                await session.make(tasks, attempts, log)
    wanted = {(task.id, number) for task in tasks for number in range(attempts)}
    return [score([a for a in log.attempts if (a.task_id, a.number) in wanted], ks) for log in logs]


# ---------------------------------------------------------------------------------------------- several runs


def compare_runs(options: argparse.Namespace, settings: list[str], ks: list[int], out: Path) -> None:
    """Curves of every run, the comparison at a target and at a budget, and the figure."""
    folders = [open_folder(path) for path in options.runs]
    names = [folder.path.name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--runs {' '.join(map(str, options.runs))}",
            expected="folders of different names: a run is called by its folder's in the table and beside --json",
            remedy="name each run once, or rename one of the folders",
        )
    curves = evaluated(folders, options, settings, ks, out) if options.tasks else recorded(folders)
    shared = shared_ks(curves, ks)
    if not shared:
        raise ConfigError(
            f"no pass@k that all {len(curves)} runs have: {', '.join(str(folder.path) for folder in folders)}",
            expected="evaluations of every run",
            remedy="train with run.evaluate_every, or with run.export_every and name --tasks",
        )
    found = [compare(curves, k, target=options.target, budget_hours=options.budget_hours) for k in shared]
    unit = (
        "GPU-hours" if any(row.gpu_memory_bytes for f in folders for row in read_rows(f.metrics)) else "machine-hours"
    )
    content = {"unit": unit, "comparisons": found, "curves": curves}
    out.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    draw_costs([panel(curves, c) for c in found], unit, out.with_suffix(".png"))
    for comparison in found:
        show_comparison(comparison, unit)
    print(f"{out}, {out.with_suffix('.png')}")


def recorded(folders: Sequence[RunFolder]) -> list[Curve]:
    """What the runs found out about themselves."""
    curves = [
        Curve(
            run=folder.path.name,
            schedule=read_rows(folder.metrics)[0].schedule,
            evaluations=read_evaluations(folder.evaluations),
        )
        for folder in folders
    ]
    refuse_unlike(
        [scored_then(str(f.path), f.read_config(), e) for f, curve in zip(folders, curves) for e in curve.evaluations],
        remedy="compare runs that were evaluated alike, or train with run.export_every and name --tasks: then every "
        "policy is evaluated anew",
    )
    return curves


def evaluated(
    folders: Sequence[RunFolder], options: argparse.Namespace, settings: list[str], ks: list[int], out: Path
) -> list[Curve]:
    """A curve of every run, whose policies at its cadence are evaluated now; nothing is started for runs that cannot
    be compared."""
    policies = [policies_of(folder) for folder in folders]
    runs = [asked_of(f, tuple(found.values()), options, settings) for f, found in zip(folders, policies)]
    refuse_unlike(
        [scored_now(str(folder.path), run.config, run.tasks) for folder, run in zip(folders, runs)],
        remedy="settings come from each run's own config.toml: give those named above for all runs on this command "
        "line, or one --config FILE",
    )
    outs = [
        [out.with_name(f"{out.stem}.{folder.path.name}.update_{updates:05d}") for updates in found]
        for folder, found in zip(folders, policies)
    ]
    logs = [attempt_logs(run, own) for run, own in zip(runs, outs)]
    curves = []
    for folder, found, run, own in zip(folders, policies, runs, logs):
        results = asyncio.run(scores(run, own, options.attempts, ks, out.parent / "logs"))
        curves.append(curve_of(folder, dict(zip(found, results))))
    return curves


def policies_of(folder: RunFolder) -> dict[int, Path]:
    """The policies of a run by the number of updates they have had, from the one it began with on."""
    found = {int(p.name.removeprefix("update_")): p.absolute() for p in sorted(folder.policies.glob("update_*"))}
    if not found:
        raise ConfigError(
            f"{folder.policies} holds no policy",
            expected="policies at a fixed cadence",
            remedy="train with --run.export_every N; without --tasks the run's own evaluations are compared",
        )
    return {0: Path(folder.read_config().learner.model).absolute(), **found}


def asked_of(folder: RunFolder, policies: tuple[Path, ...], options: argparse.Namespace, settings: list[str]) -> Asked:
    """`policies` on the tasks that --tasks and the settings name; says where the run was trained on others."""
    given = any(word.partition("=")[0] == "--config" for word in settings)
    file = [] if given else ["--config", str(folder.config)]
    config = prepared(load_config([*file, *settings], prog="evaluate.py"), options)
    own = folder.read_config().tasks
    others = [
        f"tasks.{name} = {trained!r}, evaluated with {now!r}"
        for name in ("source", "path", "kinds")
        if (trained := getattr(own, name)) != (now := getattr(config.tasks, name))
    ]
    if others:
        print(f"note: {folder.path} was trained with {'; '.join(others)}", flush=True)
    return Asked(config=config, tasks=heldout(config, options.tasks), policies=policies)


def curve_of(folder: RunFolder, results: dict[int, Score]) -> Curve:
    """The scores of a run's policies, by updates, against what they had cost."""
    rows = {row.update + 1: row for row in read_rows(folder.metrics)}
    evaluations = tuple(
        Evaluation(
            updates=updates,
            policy_version=updates,
            device_hours=(rows[updates].device_hours or 0.0) if updates in rows else 0.0,
            score=result,
        )
        for updates, result in results.items()
    )
    return Curve(run=folder.path.name, schedule=next(iter(rows.values())).schedule, evaluations=evaluations)


def panel(curves: list[Curve], comparison: Comparison) -> Panel:
    """What is drawn of one k."""
    series = []
    for curve in curves:
        points = [(e.device_hours, e.pass_at(comparison.k)) for e, _ in curve.points(comparison.k)]
        series.append(
            Series(
                name=f"{curve.run} ({curve.schedule})",
                hours=[hours for hours, _ in points],
                values=[estimate.value for _, estimate in points],
                low=[estimate.low for _, estimate in points],
                high=[estimate.high for _, estimate in points],
            )
        )
    return Panel(
        title=f"pass@{comparison.k}, held-out", series=series, target=comparison.target, budget=comparison.budget_hours
    )


# ---------------------------------------------------------------------------------------------- what a person reads


def show_comparison(comparison: Comparison, unit: str) -> None:
    """A row a run."""
    title = f"pass@{comparison.k}: {unit} to {comparison.target:.1%}, score within {comparison.budget_hours:.4g}"
    table = Table(title=title)
    for heading in ("run", "schedule", f"{unit} to target", "updates", "at budget", "updates"):
        table.add_column(heading)
    for run in comparison.runs:
        hours = "not reached" if run.hours_to_target is None else f"{run.hours_to_target:.4g}"
        value = "nothing yet" if run.at_budget is None else f"{run.at_budget:.1%}"
        counts = ["–" if n is None else str(n) for n in (run.updates_to_target, run.updates_at_budget)]
        table.add_row(run.run, run.schedule, hours, counts[0], value, counts[1])
    Console(highlight=False).print(table)


def show(result: Score) -> None:
    """The table of one policy."""
    console, table = Console(highlight=False), Table(title=f"{result.tasks} tasks, {result.sent} attempts")
    for heading in ("", "over all", "over completed"):
        table.add_column(heading)
    over_completed = result.accuracy_over_completed
    table.add_row(
        "accuracy", f"{result.accuracy_over_all:.1%}", "–" if over_completed is None else f"{over_completed:.1%}"
    )
    for row in result.pass_at:
        table.add_row(f"pass@{row.k}", in_words(row.over_all), in_words(row.over_completed))
    console.print(table)
    lost = result.sent - result.completed
    if lost:
        console.print(f"{lost} attempts were lost by the machinery: wrong on the left, not counted on the right")


def in_words(estimate: Estimate) -> str:
    """`41.2 % [33.0, 50.1] of 64 tasks`"""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.value:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}] of {estimate.tasks} tasks"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
