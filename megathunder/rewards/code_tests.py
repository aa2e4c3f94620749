"""The reward `code`: a program that the policy wrote, tested in a clean sandbox.

    columns of the row                                       tests
    tests or test_list: ["assert f(1) == 2", ...] or text    functions over `from solution import *` (MBPP)
    test: "def check(candidate): ..." and entry_point        check(the function called entry_point) (HumanEval)
    tests: [{"input": "3\\n", "output": "9\\n"}, ...]          the program reads the input and prints the output

The program is the last fenced block of the completion, or the completion. The reward is the share that passes. Outputs
are compared here; assertions run under pytest with controls that must fail, so a program that ends the process, patches
pytest or prints results earns nothing. Called by scorer.py.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from megathunder.errors import UserError
from megathunder.registry import REWARDS
from megathunder.rewards.episode import FinishedEpisode
from megathunder.rewards.functions import RewardContext
from megathunder.rewards.verifiers import repository_outcomes
from megathunder.tasks import RepositoryTests, TaskFile

FENCED = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
COLUMNS = ("tests", "test_list", "test")
Row = dict[str, Any]


def program_of(completion: str) -> str:
    """The last fenced block, or all of it."""
    blocks = FENCED.findall(completion)
    return (blocks[-1] if blocks else completion).encode(errors="replace").decode()


@REWARDS.register("code")
async def code(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """The share of the row's tests that pass. Raises UserError for a row without tests, InfrastructureFailure."""
    tests = next((row[name] for name in COLUMNS if row.get(name)), None)
    if isinstance(tests, str) and tests.lstrip().startswith("["):
        tests = json.loads(tests)
    if not tests or not isinstance(tests, str | list):
        raise UserError(
            f"reward 'code' on task {trajectory.task_id}: no tests in its columns {', '.join(row) or '(none)'}",
            expected=f"one of {', '.join(COLUMNS)}: text, a list of assertions, or a list of inputs and outputs",
            remedy="[tasks.columns] cannot help here: rename the column of the tests",
        )
    solution = TaskFile(path="solution.py", content=program_of(completion))
    if isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        return await _inputs_and_outputs(solution, tests, context)
    text = test_file(tests, str(row.get("entry_point") or ""))
    check = RepositoryTests(fail_to_pass=(), pass_to_pass=(), files=(TaskFile(path="test_solution.py", content=text),))
    outcomes = await repository_outcomes(check, [solution], context.sandboxes, context.budget_s)
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    return passed / len(outcomes) if outcomes else 0.0


def test_file(tests: str | list[str], entry_point: str) -> str:
    """A file for pytest."""
    head = "from solution import *\nimport solution\n\n"
    if isinstance(tests, list):
        functions = [f"def test_{i}():\n{textwrap.indent(str(test), '    ')}\n" for i, test in enumerate(tests)]
        return head + "\n\n".join(functions)
    if entry_point:
        return f"{head}{tests}\n\ndef test_check():\n    check(solution.{entry_point})\n"
    return head + (tests if "def test_" in tests else f"def test_all():\n{textwrap.indent(tests, '    ')}\n")


async def _inputs_and_outputs(solution: TaskFile, tests: list[Row], context: RewardContext) -> float:
    inputs = [TaskFile(path=f"input_{i}", content=str(test.get("input", ""))) for i, test in enumerate(tests)]
    sandbox = await context.sandboxes.lease([solution, *inputs], context.task.image)
    passed, left_s = 0, context.budget_s
    try:
        for i, test in enumerate(tests):
            if left_s <= 0:
                break
            result = await sandbox.exec(f"python3 -I solution.py < input_{i}", left_s)
            left_s -= result.wall_s
            passed += not result.fault and result.output.split() == str(test.get("output", "")).split()
    finally:
        await sandbox.close()
    return passed / len(tests)
