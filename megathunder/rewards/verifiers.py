"""Rewards that test suites decide, in a clean sandbox that holds what is taken of the agent's work and nothing else.

    repository   agent's sources (never tests or settings)   + pristine tests and settings   -> named tests pass?
    terminal     agent's folder (no settings of tests)       + /tests, written after it     -> weights, all, or a number

The tests run from a folder of their own with pytest from a read-only place (`run_tests.py`). Processes of the agent end
with its sandbox, and a reward file counts only under a name drawn for this call.
Called by sandbox.grading. Raises InfrastructureFailure, also for a verifier that writes no finite number.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from megathunder.errors import InfrastructureFailure
from megathunder.rewards.artifacts import take_folder
from megathunder.sandbox.bubblewrap import PYTEST_FOLDER
from megathunder.sandbox.interface import ExecResult, Leases, Sandbox
from megathunder.tasks import RepositoryTests, TaskFile, TerminalTests
from megathunder.tasks.protected_paths import decides_tests, is_protected

GRADING_FOLDER = "/tmp/grading"
REWARD_FOLDER = "/logs/verifier"
MAX_REWARD_BYTES = 65536
RESULTS = f"{GRADING_FOLDER}/results.json"
MAX_RESULTS_BYTES = 16 << 20  # a hundred thousand tests
CONTROLS = 3  # tests that must fail, in each run
SAFE = "PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1"


@cache
def runner() -> TaskFile:
    """The program that runs pytest in there."""
    text = files("megathunder.rewards").joinpath("run_tests.py").read_text()
    return TaskFile(path=f"{GRADING_FOLDER}/run_tests.py", content=text, mode=0o444)


async def repository_reward(check: RepositoryTests, sandbox: Sandbox, pool: Leases, budget_s: float) -> float:
    """1.0 if every named test passes, else 0.0. Closes `sandbox`."""
    taken = await take_folder(sandbox, "")
    await sandbox.close()
    if taken is None:
        return 0.0
    sources = [file for path, file in taken.items() if not is_protected(path)]
    return await tests_reward(check, sources, pool, budget_s)


async def tests_reward(check: RepositoryTests, sources: Iterable[TaskFile], pool: Leases, budget_s: float) -> float:
    """The same for given sources."""
    wanted = {*check.fail_to_pass, *check.pass_to_pass}
    outcomes = await repository_outcomes(check, sources, pool, budget_s)
    return float(bool(check.fail_to_pass) and all(outcomes.get(name) == "passed" for name in wanted))


async def repository_outcomes(
    check: RepositoryTests, sources: Iterable[TaskFile], pool: Leases, budget_s: float
) -> dict[str, str]:
    """{node id: outcome} of the files that the named tests lie in; of all test files if none is named."""
    names = {name.partition("::")[0] for name in (*check.fail_to_pass, *check.pass_to_pass)}
    names = names or {f.path for f in check.files if f.path.rpartition("/")[2].startswith("test_")}
    clean = await pool.lease([*sources, *check.files])
    try:
        return await run_pytest(
            clean, root="/work", test_files=[f"/work/{n}" for n in sorted(names)], budget_s=budget_s
        )
    finally:
        await clean.close()


async def terminal_reward(check: TerminalTests, sandbox: Sandbox, pool: Leases, budget_s: float) -> float:
    """A finite reward. Closes `sandbox`."""
    taken = await take_folder(sandbox, check.folder)
    await sandbox.close()
    if taken is None:
        return 0.0
    left = [renamed(file, f"{check.folder}/{path}") for path, file in taken.items() if not decides_tests(path)]
    clean = await pool.lease([*left, *(() if check.command else check.files)])
    try:
        if check.command:
            return await written_reward(check, clean, budget_s)
        tests = [f"/work/{f.path}" for f in check.files if f.path.rpartition("/")[2].startswith("test_")]
        outcomes = await run_pytest(clean, root="/work/tests", test_files=tests, budget_s=budget_s)
    finally:
        await clean.close()
    passed = {node.rpartition("::")[2] for node, outcome in outcomes.items() if outcome == "passed"}
    if check.weights:
        return math.fsum(weight for name, weight in check.weights if name.rpartition("::")[2] in passed)
    return float(bool(outcomes) and len(passed) == len(outcomes))


async def written_reward(check: TerminalTests, clean: Sandbox, budget_s: float) -> float:
    """The number that the check's command writes."""
    folder = f"/logs/{secrets.token_hex(8)}"
    await clean.upload([renamed(f, f.path, f.content.replace(REWARD_FOLDER, folder)) for f in check.files])
    command = f"mkdir -p /work{REWARD_FOLDER} /work{folder}; cd /tests; {SAFE} {check.command}"
    result = await clean.exec(command, budget_s)
    if result.fault:
        return 0.0
    for name in ("reward.json", "reward.txt"):
        data = await clean.download(f"{folder}/{name}", MAX_REWARD_BYTES)
        if data is not None:
            return parse_reward(data, name)
    raise InfrastructureFailure(
        f"the verifier wrote no reward; it ended with {result.exit_status}: {result.output[-300:]}"
    )


def parse_reward(data: bytes, name: str) -> float:
    """A finite number, alone or under `reward` in JSON; raises InfrastructureFailure otherwise."""
    try:
        value = json.loads(data) if name.endswith(".json") else float(data)
        if isinstance(value, dict):
            value = value["reward"] if "reward" in value else next(iter(value.values()))
        reward = float(value)
    except (ValueError, TypeError, KeyError, StopIteration) as error:
        raise InfrastructureFailure(f"the verifier wrote {data[:80]!r} to {name}: not a number") from error
    if not math.isfinite(reward):
        raise InfrastructureFailure(f"the verifier wrote {data[:80]!r} to {name}: not finite")
    return reward


async def run_pytest(clean: Sandbox, *, root: str, test_files: list[str], budget_s: float) -> dict[str, str]:
    """{node id relative to `root`: "passed" or "failed"}; empty if the run did not end by itself in time."""
    secret = secrets.token_hex(16)
    job = {
        "secret": secret,
        "packages": PYTEST_FOLDER,
        "root": root,
        "import_from": [root, f"{root}/src"],
        "files": test_files,
        "results": RESULTS,
        "controls": [secrets.token_hex(8) for _ in range(CONTROLS)],
    }
    await clean.upload([runner(), TaskFile(path=f"{GRADING_FOLDER}/job.json", content=json.dumps(job), mode=0o600)])
    command = f"cd {GRADING_FOLDER} && exec /usr/bin/python3 -I -B run_tests.py job.json"
    result: ExecResult = await clean.exec(command, budget_s)
    lines = [line for line in result.output.splitlines() if line.startswith(f"{secret} ")]
    data = None if result.fault or not lines else await clean.download(RESULTS, MAX_RESULTS_BYTES)
    if data is None or hashlib.sha256(data).hexdigest() != lines[-1].partition(" ")[2]:
        return {}
    return dict(json.loads(data))


def renamed(file: TaskFile, path: str, content: str | None = None) -> TaskFile:
    return TaskFile(path=path, content=file.content if content is None else content, mode=file.mode)
