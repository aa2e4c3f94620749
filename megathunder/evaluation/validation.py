"""Whether a task is sound, found out by running it: what must fail fails, what must pass passes.

    SWE-smith, SWE-bench   on the agent's files some named test fails and some passes; after the reference fix all pass
    terminal               nothing done earns less than full reward (SETA: 0); the reference solution earns 1

Called by tools/prepare_data.py and tools/inject_bugs.py. Raises InfrastructureFailure, which is no verdict.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from megathunder.jsonl import append_line, decoded_lines
from megathunder.rewards.grading import grade
from megathunder.rewards.verifiers import repository_outcomes
from megathunder.sandbox import Pool
from megathunder.tasks import RepositoryTests, Task, TaskFile
from megathunder.tasks.swe import Instance, mended, sources_of, to_task
from megathunder.tasks.terminal import Reference

FULL = 1.0 - 1e-9
FORMAT = "2"  # of verdicts: raise it when validation changes


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is empty for a sound task. The tests are those that were observed to fail and to pass."""

    reason: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()


async def validate_instance(instance: Instance, folder: Path, pool: Pool, budget_s: float) -> Verdict:
    """Runs the tests before and after the reference fix."""
    task = to_task(instance, folder, max_turns=1)
    assert isinstance(task.grading, RepositoryTests)
    after = await outcomes(task.grading, mended(instance, folder), pool, budget_s)
    if not after:
        return Verdict(reason="the tests do not run on the mended repository")
    before = await outcomes(task.grading, task.files, pool, budget_s)
    named = {*instance.fail_to_pass, *instance.pass_to_pass} or set(after)
    broken = tuple(sorted(n for n in named if after.get(n) == "passed" and before.get(n) != "passed"))
    whole = tuple(sorted(n for n in named if after.get(n) == "passed" and before.get(n) == "passed"))
    never = sorted(n for n in named if after.get(n) != "passed")
    if never:
        reason = f"{len(never)} named tests fail on the mended repository: {never[0]}"
    elif not broken:
        reason = "no test fails before the fix"
    elif not whole:
        reason = "no test passes before the fix"
    elif set(instance.fail_to_pass) - set(broken):
        reason = f"{min(set(instance.fail_to_pass) - set(broken))} should fail before the fix, and passes"
    elif set(instance.pass_to_pass) - set(whole):
        reason = f"{min(set(instance.pass_to_pass) - set(whole))} should pass before the fix, and fails"
    else:
        reason = ""
    return Verdict(reason=reason, fail_to_pass=broken, pass_to_pass=whole)


async def outcomes(
    check: RepositoryTests, repository: Sequence[TaskFile], pool: Pool, budget_s: float
) -> dict[str, str]:
    """{node id: outcome} of the check's tests on the sources of `repository`."""
    kept = set(sources_of(file.path for file in repository))
    return await repository_outcomes(check, [f for f in repository if f.path in kept], pool, budget_s)


async def validate_terminal(
    task: Task, solution: Reference | None, pool: Pool, budget_s: float, setup_s: float = 30.0
) -> Verdict:
    """Grades an agent that did nothing, and the reference solution."""
    if solution is None:
        return Verdict(reason="there is no reference solution")
    idle = await reward_after(task, "true", pool, budget_s, setup_s)
    if idle >= FULL or (task.kind == "seta" and idle != 0.0):
        return Verdict(reason=f"doing nothing earns {idle:g}")
    solved = await reward_after(task, solution.script, pool, budget_s, setup_s)
    return Verdict(reason="" if solved >= FULL else f"the reference solution earns {solved:g}")


async def reward_after(task: Task, script: str, pool: Pool, budget_s: float, setup_s: float) -> float:
    """What `script` earns, run where the agent's commands run."""
    sandbox = await pool.lease(task.files, task.image)
    try:
        for command in (task.setup, f"cd {task.folder or '.'}; {script}"):
            if command:
                await sandbox.exec(command, setup_s)
        return await grade(task, sandbox, "done", pool, budget_s)
    finally:
        await sandbox.close()


class Verdicts:
    """Verdicts by content, kept in a file as they are reached, so that an interrupted validation goes on."""

    def __init__(self, path: Path) -> None:
        decoder = msgspec.json.Decoder(tuple[str, Verdict])
        self._path, self._known = path, dict(pair for _, pair in decoded_lines(path, decoder))

    async def of(self, content: bytes, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        """The verdict on `content`, found by `run` if it is not known."""
        key = blake2b(FORMAT.encode() + content, digest_size=16).hexdigest()
        if key not in self._known:
            self._known[key] = await run()
            append_line(self._path, (key, self._known[key]))
        return self._known[key]
