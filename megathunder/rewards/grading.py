"""The reward of an episode: finite, from the agent's answer or from a program run in a clean sandbox.

Only the files that the task names leave the agent's sandbox; pristine files are written after them, and the expected
output is compared here, outside, so nothing the agent leaves behind can print its own reward.
Called by rollout/ and evaluation/. A grader that the machinery fails raises InfrastructureFailure, never scores 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from megathunder.errors import UserError
from megathunder.rewards.verifiers import repository_reward, terminal_reward
from megathunder.sandbox.interface import Leases, Sandbox
from megathunder.tasks import (
    BoxedAnswer,
    ExactAnswer,
    ProgramCheck,
    RepositoryTests,
    RewardFunction,
    Task,
    TaskFile,
    TerminalTests,
)
from megathunder.tasks.boxed import boxed_reward

MAX_TAKEN_BYTES = 1 << 20  # of one file of the agent


async def grade(task: Task, sandbox: Sandbox, answer: str | None, pool: Leases, budget_s: float) -> float:
    """A finite number, mostly 1.0 or 0.0. `answer` is what was submitted, None if nothing was: then the reward is 0,
    except for tasks that are judged by what is left in the sandbox.

    Closes `sandbox` before it leases a clean one, so that graders cannot starve each other. A program that is still
    running after `budget_s` seconds, or the shorter time that the task itself allows, earns 0. Raises
    InfrastructureFailure.
    """
    if answer is None and not task.judges_what_is_left:
        return 0.0
    pool, budget_s = LeasesOfImage(pool, task.image), task.grading_s(budget_s)
    match task.grading:
        case ExactAnswer(answer=right):
            return float(answer.strip() == right.strip())
        case BoxedAnswer(answer=right, or_last_number=number):
            return boxed_reward(answer, right, or_last_number=number)
        case RepositoryTests() as check:
            return await repository_reward(check, sandbox, pool, budget_s)
        case TerminalTests() as check:
            return await terminal_reward(check, sandbox, pool, budget_s)
        case ProgramCheck() as check:
            return await run_check(check, sandbox, pool, budget_s)
        case RewardFunction():
            raise UserError(
                f"task {task.id} has no grader of its own",
                expected="[reward] function, or an environment or an agent that gives a reward",
                remedy='[reward] function = "rewards.py:score", or a built-in name such as "exact" or "boxed"',
            )


class LeasesOfImage:
    """Clean sandboxes of the image that the task asks for."""

    def __init__(self, pool: Leases, image: str) -> None:
        self._pool, self._image = pool, image

    async def lease(self, files: Iterable[TaskFile] = (), image: str = "") -> Sandbox:
        return await self._pool.lease(files, image or self._image)


async def run_check(check: ProgramCheck, sandbox: Sandbox, pool: Leases, budget_s: float) -> float:
    """Runs the check's command on the agent's files in a clean sandbox."""
    taken = []
    for path in check.taken:
        content = await sandbox.download(path, MAX_TAKEN_BYTES)
        if content is None:
            return 0.0
        taken.append(TaskFile(path=path, content=content.decode(errors="replace")))
    await sandbox.close()
    clean = await pool.lease([*taken, *check.files])
    try:
        result = await clean.exec(check.command, budget_s)
    finally:
        await clean.close()
    return float(not result.fault and result.output.strip() == check.expected.strip())
