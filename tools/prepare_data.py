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
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure, MegathunderError, UserError
from megathunder.evaluation.validation import Verdict, validate_instance, validate_terminal
from megathunder.metrics.output import output_file
from megathunder.sandbox import SandboxPool
from megathunder.tasks import Task
from megathunder.tasks.benchmarks import REPOSITORIES
from megathunder.tasks.rows import raw_rows
from megathunder.tasks.swe import Instance, by_repository, instance_files, to_task
from megathunder.tasks.terminal import read_folder, reference, split_folders, task_folders

FORMAT = "2"  # of verdicts: raise it when validation changes
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


class Verdicts:
    """Verdicts by content, kept in a file as they are reached."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, dict[str, Verdict]()
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                key, verdict = msgspec.json.decode(line, type=tuple[str, Verdict])
            except msgspec.DecodeError:
                continue  # cut off when a run was interrupted
            self._known[key] = verdict

    async def of(self, content: bytes, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The verdict on `content`, found by `run` if it is not known."""
        key = blake2b(FORMAT.encode() + content, digest_size=16).hexdigest()
        if key not in self._known:
            self._known[key] = await run()
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode((key, self._known[key])) + b"\n")
        return self._known[key]


def main(argv: list[str]) -> int:
    """Prepare one source; exit status 0, 1 (failed) or 2 (mend the input)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("format", choices=("swe-smith", "swe-bench", "seta", "terminal"))
    parser.add_argument("--in", dest="source", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--exclude", type=Path, help="file of task ids and repositories to leave out, one a line")
    parser.add_argument("--parallel", type=int, default=4, help="tasks validated at once")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that one run of the tests may take")
    options = parser.parse_args(argv)
    report = Report()
    try:
        output_file(options.out / "report.json")
        asyncio.run((instances if options.format.startswith("swe") else terminal)(options, report))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    written = {"stages": report.kept, "separation": SEPARATION, "left_out": report.left_out}
    (options.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1))
    for reason, count in Counter(r.partition(":")[0] for r in report.left_out.values()).most_common(8):
        print(f"  left out: {count:5d}  {reason}")
    return 0


async def instances(options: argparse.Namespace, report: Report) -> None:
    """Instances with their repositories, SWE-smith or SWE-bench."""
    rows = [row for path in instance_files(options.source) for row in raw_rows(path)]
    report.stage("read", len(rows))
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(msgspec.convert(row, Instance))
        except msgspec.ValidationError as error:
            report.left_out[f"row {number}"] = f"schema: {error}"
    report.stage("schema", len(found))
    described = [i for i in found if i.problem_statement.strip()]
    report.left_out.update({i.instance_id: "statement: it is empty" for i in found if i not in described})
    report.stage("statement", len(described))
    found = described
    if options.format == "swe-smith":
        found = separate(
            found, lambda i: (i.instance_id, i.repository, i.repository.rpartition(".")[0]), options, report
        )
    found = once(found, lambda i: i.instance_id, lambda i: f"{i.repo}\0{i.patch}", report)

    async def verdict(instance: Instance, pool: SandboxPool, verdicts: Verdicts) -> Verdict:
        content = msgspec.json.encode((instance, to_task(instance, options.source, 1)))
        return await verdicts.of(content, lambda: validate_instance(instance, options.source, pool, options.budget))

    found = await validated(found, lambda i: i.instance_id, verdict, options, report)
    train, dev = by_repository(found) if options.format == "swe-smith" else ([], found)
    for name, part in (("train", train), ("dev", dev)):
        text = b"".join(msgspec.json.encode(instance) + b"\n" for instance in part)
        (options.out / f"{name}.jsonl").write_bytes(text)
        report.stage(name, len(part))
    if options.out.resolve() != options.source.resolve():
        shutil.copytree(options.source / "repos", options.out / "repos", dirs_exist_ok=True)


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
        content = msgspec.json.encode((task, solution.script if solution else ""))
        return await verdicts.of(content, lambda: validate_terminal(task, solution, pool, options.budget))

    found = await validated(found, lambda pair: pair[1].id, verdict, options, report)
    train, dev = split_folders([folder for folder, _ in found])
    for name, part in (("train", train), ("dev", dev)):
        (options.out / name).mkdir(exist_ok=True)
        names = {folder.name for folder in part}
        for old in (options.out / name).iterdir():  # of an earlier run with other verdicts
            if old.name not in names and any((old / file).is_file() for file in ("task.toml", "task.yaml")):
                shutil.rmtree(old)
        for folder in part:
            shutil.copytree(folder, options.out / name / folder.name, dirs_exist_ok=True)
        report.stage(name, len(part))


def separate(items: Sequence, names: Callable, options: argparse.Namespace, report: Report) -> list:
    """Those that no benchmark and no line of --exclude names."""
    excluded = REPOSITORIES | set(options.exclude.read_text().split() if options.exclude else ())
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
    verdicts, places = Verdicts(options.out / "verdicts.jsonl"), asyncio.Semaphore(options.parallel)
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
