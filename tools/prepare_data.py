#!/usr/bin/env python
"""Prepare tasks for training: check, filter, run, split, and report how many are left after each stage.

    python tools/prepare_data.py swe-smith --in DIR --out OUT      DIR/*.jsonl|json|parquet and DIR/repos/NAME/
    python tools/prepare_data.py swe-bench --in DIR --out OUT      the same; all for evaluation, none to train on
    python tools/prepare_data.py seta      --in DIR --out OUT      DIR/NAME/{task.toml,instruction.md,tests/,...}
    python tools/prepare_data.py terminal  --in DIR --out OUT      Harbor and Terminal-Bench 1 folders

Stages: read, schema, statement (an instance without a problem statement is left out), benchmark (repositories and ids
of benchmarks, and --exclude FILE, are left out), duplicate, run, train, dev. Of the 50,908 instances of SWE-smith's
Python release 39,471 should be left, of SETA's 4,567 tasks all.
run, SWE-smith: tests before and after the fault; at least one fails because of it and at least one still passes.
run, terminal:  doing nothing earns no full reward, the reference solution earns it.
OUT gets train and dev (5 % by repository or family), report.json with the reason for every task left out, and
verdicts.jsonl: verdicts by content, so that a second or an interrupted run does not run anything again.
Exit status: 0 done, 1 failed, 2 the input or an option must be mended (no task left included), 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure, MegathunderError, UserError
from megathunder.evaluation.validation import Verdict, Verdicts, validate_instance, validate_terminal
from megathunder.metrics.output_file import output_file
from megathunder.process_exit import INTERRUPTED
from megathunder.sandbox import SandboxPool
from megathunder.sandbox.bubblewrap import UIDS_PER_PROCESS
from megathunder.tasks import Task
from megathunder.tasks.benchmarks import REPOSITORIES
from megathunder.tasks.row_files import raw_rows
from megathunder.tasks.swe import REPORT, VERDICTS, Instance, by_repository, instance_files, to_task
from megathunder.tasks.terminal import read_folder, reference, split_folders, task_folders

FORMATS = {
    "swe-smith": "instances (*.jsonl, *.json or *.parquet) and repos/NAME/ for their repositories",
    "swe-bench": "instances (*.jsonl, *.json or *.parquet) and repos/NAME/, clones that hold their base_commit",
    "seta": "NAME/ for each task: task.toml, instruction.md, tests/",
    "terminal": "NAME/ for each task: task.toml and instruction.md, or task.yaml; tests/",
}
MOST_AT_ONCE = (UIDS_PER_PROCESS - 2) // 9  # of the sandboxes that a pool has for so many: 2 x 4 open, 1 warm
SEPARATION = (
    "No task of a repository or id listed as a benchmark's is kept. This does not prove that no text of a benchmark "
    "occurs in a task: copies under other names, forks, and what a pretrained model has read are not looked for."
)


@dataclass(slots=True, kw_only=True)
class Report:
    """How many are left after each stage, and why the others are not."""

    kept: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def stage(self, name: str, count: int) -> None:
        self.kept[name] = count
        print(f"{name:10s} {count}", flush=True)


def main(argv: list[str]) -> int:
    """Prepare one source; exit status 0, 1 (failed), 2 (mend the input) or 130 (interrupted)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("--in", dest="source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--exclude", type=Path, help="file of task ids and repositories to leave out, one a line")
    parser.add_argument("--parallel", type=int, default=4, help="tasks validated at once")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that one run of the tests may take")
    options = parser.parse_args(argv)
    report = Report()
    try:
        check(options)
        asyncio.run((instances if options.format.startswith("swe") else terminal)(options, report))
        write(options, report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MegathunderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        told = f"verdicts so far are in {options.out / VERDICTS}, and the same command goes on from there"
        print(f"interrupted: {told}", file=sys.stderr)
        return INTERRUPTED
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse, before anything is read or run, what cannot be prepared from, with or into."""
    source, out, wanted = options.source, options.out, FORMATS[options.format]
    swe = options.format.startswith("swe")
    if not source.is_dir() or (swe and not any((source / name).is_dir() for name in ("repos", "repo"))):
        seen = "a file" if source.is_file() else "it holds no folder repos" if source.is_dir() else "no such folder"
        raise UserError(
            f"--in {source}: {seen}", expected=f"a folder with {wanted}", remedy="name one, or lay it out so"
        )
    if not 1 <= options.parallel <= MOST_AT_ONCE or not 0 < options.budget < math.inf:
        raise UserError(
            f"--parallel {options.parallel} --budget {options.budget}",
            expected=f"1 to {MOST_AT_ONCE} tasks at once, and a number of seconds above 0",
            remedy="for example --parallel 4 --budget 60",
        )
    named(options.exclude)
    places = [source / "repos", source / "repo"] if swe else task_folders(source)
    if inside := [place for place in places if out.resolve().is_relative_to(place.resolve())]:
        raise UserError(f"--out {out} lies in {inside[0]}", expected="a folder outside", remedy="name another --out")
    if not swe:
        check_folders(out, places)
    output_file(out / REPORT)
    for name in (VERDICTS, "train.jsonl", "dev.jsonl") if swe else (VERDICTS, "train/task.toml", "dev/task.toml"):
        output_file(out / name)


def check_folders(out: Path, tasks: Sequence[Path]) -> None:
    """Tasks in `out`/train and `out`/dev are replaced: they must be those of an earlier run, and not what is read."""
    for folder in (out / "train", out / "dev"):
        if any(task.resolve().is_relative_to(folder.resolve()) for task in tasks):
            seen = f"--in names tasks in {folder}, which is written anew"
        elif folder.is_dir() and not (out / VERDICTS).exists() and any(map(is_task, folder.iterdir())):
            seen = f"{folder} holds tasks that this tool has not put there"
        else:
            continue
        raise UserError(seen, expected="a folder that may be replaced", remedy="name another --out")


def named(exclude: Path | None) -> set[str]:
    """The ids and repositories of --exclude."""
    try:
        return set(exclude.read_text().split()) if exclude else set()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--exclude {exclude}: {getattr(error, 'strerror', None) or error}",
            expected="a text file of task ids and repositories, one a line",
            remedy="write one, or leave the option out",
        ) from None


def write(options: argparse.Namespace, report: Report) -> None:
    """The report; raises UserError where no task is left."""
    written = {"stages": report.kept, "separation": SEPARATION, "left_out": report.left_out}
    (options.out / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1))
    for reason, count in Counter(r.partition(":")[0] for r in report.left_out.values()).most_common(8):
        print(f"  left out: {count:5d}  {reason}")
    if not report.kept["train"] + report.kept["dev"]:
        often = "".join(f"; most often: {reason}" for reason, _ in Counter(report.left_out.values()).most_common(1))
        raise UserError(
            f"none of the {report.kept['read']} tasks read from {options.source} is left{often}",
            expected=f"a sound task of the format {options.format}: {FORMATS[options.format]}",
            remedy=f"{options.out / REPORT} has the reason for every task",
        )


async def instances(options: argparse.Namespace, report: Report) -> None:
    """Instances with their repositories, SWE-smith or SWE-bench."""
    rows = [row for path in instance_files(options.source) for row in raw_rows(path)]
    report.stage("read", len(rows))
    found = []
    for number, row in enumerate(rows):
        try:
            instance = msgspec.convert(row, Instance)
        except msgspec.ValidationError as error:
            report.left_out[f"row {number}"] = f"schema: {error}"
            continue
        if options.format == "swe-bench" and not instance.is_bench:
            report.left_out[instance.instance_id] = "schema: it has no base_commit, as a SWE-bench instance has"
        else:
            found.append(instance)
    report.stage("schema", len(found))
    described = [i for i in found if i.problem_statement.strip()]
    report.left_out.update({i.instance_id: "statement: it is empty" for i in found if i not in described})
    report.stage("statement", len(described))
    found = described
    found = separate(found, lambda i: (i.instance_id, i.repository, i.repository.rpartition(".")[0]), options, report)
    found = once(found, lambda i: i.instance_id, lambda i: f"{i.repo}\0{i.patch}", report)

    async def verdict(instance: Instance, pool: SandboxPool, verdicts: Verdicts) -> Verdict:
        content = msgspec.json.encode((instance, to_task(instance, options.source, 1), options.budget))
        return await verdicts.of(content, lambda: validate_instance(instance, options.source, pool, options.budget))

    found = await validated(found, lambda i: i.instance_id, verdict, options, report)
    train, dev = by_repository(found) if options.format == "swe-smith" else ([], found)
    for name, part in (("train", train), ("dev", dev)):
        text = b"".join(msgspec.json.encode(instance) + b"\n" for instance in part)
        (options.out / f"{name}.jsonl").write_bytes(text)
        report.stage(name, len(part))
    for name in ("repos", "repo"):
        if (options.source / name).is_dir() and options.out.resolve() != options.source.resolve():
            shutil.copytree(options.source / name, options.out / name, symlinks=True, dirs_exist_ok=True)


async def terminal(options: argparse.Namespace, report: Report) -> None:
    """Folders of tasks."""
    folders = task_folders(options.source)
    report.stage("read", len(folders))
    found: list[tuple[Path, Task]] = []
    for folder in folders:
        try:
            found.append((folder, read_folder(folder, 1)))
        except (UserError, KeyError, ValueError) as error:
            report.left_out[folder.name] = f"schema: {error}".split("\n")[0]
    report.stage("schema", len(found))
    found = separate(found, lambda pair: (pair[1].id,), options, report)
    found = once(found, lambda pair: pair[1].id, lambda pair: pair[1].prompt, report)

    async def verdict(pair: tuple[Path, Task], pool: SandboxPool, verdicts: Verdicts) -> Verdict:
        folder, task = pair
        solution = reference(folder)
        content = msgspec.json.encode((task, solution.script if solution else "", options.budget))
        return await verdicts.of(content, lambda: validate_terminal(task, solution, pool, options.budget))

    found = await validated(found, lambda pair: pair[1].id, verdict, options, report)
    train, dev = split_folders([folder for folder, _ in found])
    for name, part in (("train", train), ("dev", dev)):
        (options.out / name).mkdir(exist_ok=True)
        names = {folder.name for folder in part}
        for old in (options.out / name).iterdir():  # of an earlier run with other verdicts
            if old.name not in names and is_task(old):
                shutil.rmtree(old)
        for folder in part:
            shutil.copytree(folder, options.out / name / folder.name, dirs_exist_ok=True)
        report.stage(name, len(part))


def is_task(folder: Path) -> bool:
    """Whether a terminal task lies there."""
    return any((folder / file).is_file() for file in ("task.toml", "task.yaml"))


def separate(items: Sequence, names: Callable, options: argparse.Namespace, report: Report) -> list:
    """Those that no line of --exclude names, and no benchmark, but where that is what is prepared."""
    excluded = named(options.exclude) | (REPOSITORIES if options.format != "swe-bench" else set())
    kept = [item for item in items if not excluded & set(names(item))]
    report.left_out.update({names(i)[0]: "benchmark: its id or repository is excluded" for i in items if i not in kept})
    report.stage("benchmark", len(kept))
    return kept


def once(items: Sequence, name: Callable, content: Callable, report: Report) -> list:
    """The first of those with one id or one content."""
    kept, seen = [], set[str]()
    for item in items:
        if {name(item), content(item)} & seen:
            report.left_out[name(item)] = "duplicate: of an earlier task"
        else:
            kept.append(item)
        seen |= {name(item), content(item)}
    report.stage("duplicate", len(kept))
    return kept


async def validated(
    items: Sequence, name: Callable, verdict: Callable, options: argparse.Namespace, report: Report
) -> list:
    """Those that run as they should; --parallel of them at once."""
    verdicts, places = Verdicts(options.out / VERDICTS), asyncio.Semaphore(options.parallel)
    pool = SandboxPool(
        SandboxConfig(warm=options.parallel, max_open=4 * options.parallel, max_running=options.parallel)
    )
    await pool.start()

    async def reason(item: object) -> str:
        async with places:
            try:
                return f"run: {found}" if (found := (await verdict(item, pool, verdicts)).reason) else ""
            except InfrastructureFailure as failure:
                return f"run: no verdict: {failure}"
            except UserError as error:
                return f"run: {error}".split("\n")[0]

    try:
        reasons = await asyncio.gather(*map(reason, items))
    finally:
        await pool.close()
    report.left_out.update({name(item): why for item, why in zip(items, reasons) if why})
    kept = [item for item, why in zip(items, reasons) if not why]
    report.stage("run", len(kept))
    return kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
