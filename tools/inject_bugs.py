#!/usr/bin/env python
"""Make tasks in SWE-smith's format from sound repositories: one procedural fault each, kept if the tests notice.

    python tools/inject_bugs.py --repos examples/tasks/swe/repos --out examples/tasks/swe/instances.jsonl --each 9

Every folder of --repos is a repository with tests that pass. A fault is one change of one expression (comparison,
arithmetic, constant, boolean, condition, call of min/max, slice bound); at least one test must fail because of it and
at least one must still pass. Faults that break the same tests in the same function are made once. Verdicts are kept
beside --out until it is written, so that an interrupted run goes on.
Exit status: 0 done, 1 failed, 2 the input or an option must be mended (no task made included), 130 interrupted.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import MegathunderError, UserError
from megathunder.evaluation.validation import Verdict, Verdicts, validate_instance
from megathunder.metrics.output_file import output_file
from megathunder.process_exit import INTERRUPTED
from megathunder.sandbox import SandboxPool
from megathunder.tasks.patch import make_patch
from megathunder.tasks.protected_paths import is_protected, is_test_file
from megathunder.tasks.swe import Instance, repository_files, to_task

BUDGET_S = 20.0
AT_ONCE = 4
COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`text` of `path` after one change inside `function`."""

    path: str
    function: str
    kind: str
    text: str
    described: str


def main(argv: list[str]) -> int:
    """Make, validate and write the instances; prints counts a repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repos", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=9, help="tasks a repository")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    kept = options.out.with_name(f".{options.out.name}.verdicts")
    try:
        names = check(options.repos, options.each)
        output_file(options.out)
        work = make(options.repos, names, options.each, options.seed, Verdicts(output_file(kept)))
        instances, left_out = asyncio.run(work)
        kept.unlink(missing_ok=True)
        if not instances:
            raise nothing(options.repos, names, left_out)
        options.out.write_bytes(b"".join(msgspec.json.encode(instance) + b"\n" for instance in instances))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MegathunderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: verdicts so far are in {kept}, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    print(f"{len(instances)} tasks in {options.out}")
    if options.out.parent.resolve() != options.repos.parent.resolve():
        print(f"note: tasks.path names one folder; put {options.out} beside {options.repos} before it is named")
    return 0


def check(repos: Path, each: int) -> list[str]:
    """The names of the repositories; UserError where there is nothing to make tasks from."""
    found = sorted(p.name for p in repos.iterdir() if p.is_dir()) if repos.is_dir() else []
    if repos.name != "repos" or not found:
        seen = "a file" if repos.is_file() else "no such folder"
        if repos.is_dir():
            seen = "it holds no folder" if repos.name == "repos" else "no folder called repos"
        raise UserError(
            f"--repos {repos}: {seen}",
            expected="a folder called repos that holds a folder for each repository",
            remedy="put them there; tasks and repos/ lie in one folder, which is what tasks.path names",
        )
    if each < 1:
        raise UserError(f"--each {each}", expected="at least one task a repository", remedy="for example --each 9")
    return found


def nothing(repos: Path, names: list[str], left_out: Counter[str]) -> UserError:
    """The error where no fault makes a task, because of `left_out`."""
    return UserError(
        f"no fault of the {len(names)} repositories in {repos} makes a task: {', '.join(left_out)}",
        expected="repositories of Python modules with tests that pass, and that fail where an expression is wrong",
        remedy="python -m pytest in each folder shows how its tests end; see examples/tasks/swe/repos",
    )


async def make(
    repos: Path, names: list[str], each: int, seed: int, verdicts: Verdicts
) -> tuple[list[dict[str, object]], Counter[str]]:
    """Valid instances of every repository, and why other faults make none."""
    pool, left_out = SandboxPool(SandboxConfig(warm=AT_ONCE, max_running=AT_ONCE)), Counter[str]()
    await pool.start()
    try:
        found = []
        for repo in names:
            work = Work(folder=repos.parent, repo=repo, pool=pool, verdicts=verdicts)
            made, reasons = await of_repository(work, each, random.Random(f"{seed}/{repo}"))
            why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
            print(f"{repo}: {len(made)} tasks{f'; left out: {why}' if why else ''}", flush=True)
            found += made
            left_out += reasons
    finally:
        await pool.close()
    return found, left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One repository of `folder`/repos, and where its faults are tried."""

    folder: Path
    repo: str
    pool: SandboxPool
    verdicts: Verdicts

    async def verdict(self, instance: Instance) -> Verdict:
        content = msgspec.json.encode((instance, to_task(instance, self.folder, 1), BUDGET_S))
        return await self.verdicts.of(content, lambda: validate_instance(instance, self.folder, self.pool, BUDGET_S))


async def of_repository(work: Work, each: int, rng: random.Random) -> tuple[list[dict[str, object]], Counter[str]]:
    """Up to `each` instances of one repository, and why other faults make none."""
    files, candidates, reasons = repository_files(work.folder, work.repo, ""), list[Fault](), Counter[str]()
    for path in (p for p in files if p.endswith(".py") and not is_protected(p)):
        try:
            candidates += faults(path, files[path])
        except (SyntaxError, ValueError) as error:
            reasons[f"{path} is no Python: {error}"] += 1
    if not any(is_test_file(path) for path in files):
        return [], Counter(["there are no tests"])
    if not candidates and not reasons:
        reasons["there is no expression to change in a function of a module"] += 1
    rng.shuffle(candidates)
    kept: list[dict[str, object]] = []
    known: set[tuple[str, ...]] = set()
    for start in range(0, len(candidates), AT_ONCE):
        part = candidates[start : start + AT_ONCE]
        drafts = [draft(work.repo, fault, files[fault.path]) for fault in part]
        verdicts = await asyncio.gather(*map(work.verdict, drafts))
        for fault, instance, verdict in zip(part, drafts, verdicts):
            mark = (fault.function, *verdict.fail_to_pass)
            if verdict.reason:
                reasons[verdict.reason.partition(":")[0]] += 1
            elif mark not in known and len(kept) < each:
                known.add(mark)
                kept.append(finished(instance, verdict.fail_to_pass, verdict.pass_to_pass))
        if len(kept) == each:
            break
    return kept, reasons


def draft(repo: str, fault: Fault, clean: str) -> Instance:
    """The instance of a fault, before its tests are known."""
    patch = make_patch(fault.path, clean, fault.text)
    digest = blake2b(patch.encode(), digest_size=4).hexdigest()
    return Instance(
        instance_id=f"{repo}.func_pm_{fault.kind}__{digest}",
        repo=f"local/{repo}",
        patch=patch,
        FAIL_TO_PASS=[],
        PASS_TO_PASS=[],
        problem_statement=fault.described,
    )


def finished(instance: Instance, broken: tuple[str, ...], whole: tuple[str, ...]) -> dict[str, object]:
    """The row that is written: SWE-smith's fields."""
    shown = broken[0].rpartition("::")[2].replace("_", " ").removeprefix("test ")
    return {
        "instance_id": instance.instance_id,
        "repo": instance.repo,
        "patch": instance.patch,
        "FAIL_TO_PASS": list(broken),
        "PASS_TO_PASS": list(whole),
        "image_name": "",
        "problem_statement": f"{instance.problem_statement} For example, this no longer holds: {shown}.",
    }


def faults(path: str, text: str) -> Iterator[Fault]:
    """Every single-expression fault of a module; SyntaxError or ValueError where it is none. What stands inside an
    f-string has no place of its own in the text before Python 3.12, and is left as it is."""
    tree = ast.parse(text, path)
    module = Path(path).stem
    placeless = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        promise = (ast.get_docstring(function) or "see its callers").split("\n")[0]
        described = f"`{function.name}` in {path} does not do what it says: {promise}"
        for node in (n for n in ast.walk(function) if n not in placeless):
            for kind, changed in changes(node):
                broken = replaced(text, node, changed)
                yield Fault(
                    path=path, function=f"{module}.{function.name}", kind=kind, text=broken, described=described
                )


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(kind, source of the changed expression)"""
    match node:
        case ast.Compare(ops=[operator, *rest]) if type(operator) in COMPARE:
            yield "compare", ast.unparse(ast.Compare(node.left, [COMPARE[type(operator)](), *rest], node.comparators))
        case ast.BinOp(op=operator) if type(operator) in ARITHMETIC and not isinstance(node.right, ast.Set):
            yield "op_change", ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(operator)](), node.right))
        case ast.BoolOp(op=operator):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield "bool_change", f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "off_by_one", str(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield "call_change", ast.unparse(ast.Call(ast.Name(SWAPPED[name]), node.args, node.keywords))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign_change", ast.unparse(operand)
        case ast.IfExp(test=test, body=body, orelse=other):
            yield "cond_swap", ast.unparse(ast.IfExp(test, other, body))


def replaced(text: str, node: ast.expr, changed: str) -> str:
    """`text` with the source of `node` exchanged; everything else keeps its form."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    data = b"".join(lines)
    return (data[:start] + changed.encode() + data[end:]).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
