"""Several runs: what their policies score against what they cost. Called by `command.py`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megathunder.config.load import load_config
from megathunder.errors import ConfigError
from megathunder.evaluation import Score
from megathunder.evaluation.comparable import planned_basis, recorded_basis, require_comparable
from megathunder.evaluation.cost_comparison import Comparison, Curve, compare, shared_ks
from megathunder.evaluation.cost_figure import Panel, Series, draw_costs
from megathunder.evaluation.history import Evaluation, read_evaluations
from megathunder.evaluation.request import EvaluationRequest, attempt_logs, heldout, prepared, scores
from megathunder.evaluation.score_tables import show_comparison
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder, open_folder


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
    require_comparable(
        [
            recorded_basis(str(f.path), f.read_config(), e)
            for f, curve in zip(folders, curves)
            for e in curve.evaluations
        ],
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
    runs = [request_for(f, tuple(found.values()), options, settings) for f, found in zip(folders, policies)]
    require_comparable(
        [planned_basis(str(folder.path), run.config, run.tasks) for folder, run in zip(folders, runs)],
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


def request_for(
    folder: RunFolder, policies: tuple[Path, ...], options: argparse.Namespace, settings: list[str]
) -> EvaluationRequest:
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
    return EvaluationRequest(config=config, tasks=heldout(config, options.tasks), policies=policies)


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
