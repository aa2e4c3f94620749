#!/usr/bin/env python
"""Make tasks in SWE-smith's format from sound repositories: one procedural fault each, kept if the tests notice.

    python tools/inject_bugs.py --repos examples/tasks/swe/repos --out examples/tasks/swe/instances.jsonl --each 9

Every folder of --repos is a repository with tests that pass. A fault is one change of one expression (comparison,
arithmetic, constant, boolean, condition, call of min/max, slice bound); at least one test must fail because of it and
at least one must still pass. Faults that break the same tests in the same function are made once.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import difflib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import MegathunderError, UserError
from megathunder.evaluation.validation import validate_instance
from megathunder.metrics.output import output_file
from megathunder.sandbox import SandboxPool
from megathunder.tasks.protected import is_protected
from megathunder.tasks.swe import Instance, repository_files

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
    try:
        _check(options.repos)
        output_file(options.out)
        instances = asyncio.run(make(options.repos, options.each, options.seed))
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.write_bytes(b"".join(msgspec.json.encode(instance) + b"\n" for instance in instances))
    print(f"{len(instances)} tasks in {options.out}")
    return 0


def _check(repos: Path) -> None:
    if repos.name != "repos" or not repos.is_dir():
        raise UserError(
            f"--repos {repos}: {'no folder called repos' if repos.is_dir() else 'no such folder'}",
            expected="a folder called repos that holds a folder for each repository",
            remedy="put them there; tasks and repos/ lie in one folder, which is what tasks.path names",
        )


async def make(repos: Path, each: int, seed: int) -> list[dict[str, object]]:
    """Valid instances of every repository."""
    pool = SandboxPool(SandboxConfig(warm=AT_ONCE, max_running=AT_ONCE))
    await pool.start()
    try:
        found = []
        for repo in sorted(p.name for p in repos.iterdir() if p.is_dir()):
            made = await of_repository(repos.parent, repo, each, random.Random(f"{seed}/{repo}"), pool)
            print(f"{repo}: {len(made)} tasks", flush=True)
            found += made
        return found
    finally:
        await pool.close()


async def of_repository(
    folder: Path, repo: str, each: int, rng: random.Random, pool: SandboxPool
) -> list[dict[str, object]]:
    """Up to `each` instances of one repository."""
    files = repository_files(folder, repo, "")
    candidates = [f for p in files if p.endswith(".py") and not is_protected(p) for f in faults(p, files[p])]
    rng.shuffle(candidates)
    kept: list[dict[str, object]] = []
    known: set[tuple[str, ...]] = set()
    for start in range(0, len(candidates), AT_ONCE):
        part = candidates[start : start + AT_ONCE]
        drafts = [draft(repo, fault, files[fault.path]) for fault in part]
        verdicts = await asyncio.gather(*(validate_instance(d, folder, pool, BUDGET_S) for d in drafts))
        for fault, instance, verdict in zip(part, drafts, verdicts):
            mark = (fault.function, *verdict.fail_to_pass)
            if not verdict.reason and mark not in known and len(kept) < each:
                known.add(mark)
                kept.append(finished(instance, verdict.fail_to_pass, verdict.pass_to_pass))
        if len(kept) == each:
            break
    return kept


def draft(repo: str, fault: Fault, clean: str) -> Instance:
    """The instance of a fault, before its tests are known."""
    diff = difflib.unified_diff(
        clean.splitlines(keepends=True),
        fault.text.splitlines(keepends=True),
        f"a/{fault.path}",
        f"b/{fault.path}",
    )
    patch = "".join(diff)
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
    """Every single-expression fault of a module."""
    tree = ast.parse(text)
    module = Path(path).stem
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        promise = (ast.get_docstring(function) or "see its callers").split("\n")[0]
        described = f"`{function.name}` in {path} does not do what it says: {promise}"
        for node in ast.walk(function):
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
