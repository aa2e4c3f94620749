"""A grader has the time that the task's author gave it, and never more than the run allows."""

from __future__ import annotations

import asyncio

import pytest

from megathunder.rewards.grading import grade
from megathunder.sandbox import ExecResult
from megathunder.tasks import ProgramCheck, Task


class Sandboxes:
    """Leases that note the limit of each command."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    async def lease(self, files: object = (), image: str = "") -> Sandboxes:
        return self

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        self.limits.append(deadline_s)
        return ExecResult(output="yes", exit_status=0, wall_s=0.0, cpu_s=0.0)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("own", "given", "used"), [(0.0, 60.0, 60.0), (5.0, 60.0, 5.0), (90.0, 60.0, 60.0)])
def test_a_grader_runs_for_the_shorter_of_the_two_limits(own: float, given: float, used: float) -> None:
    check = ProgramCheck(taken=(), command="true", expected="yes")
    task = Task(id="t", kind="k", prompt="p", files=(), grading=check, verifier_limit_s=own)
    sandboxes = Sandboxes()
    assert asyncio.run(grade(task, sandboxes, "done", sandboxes, given)) == 1.0
    assert sandboxes.limits == [used]
