"""The sandbox of one trajectory, and its replay when the machinery fails under it.

A failed sandbox is replaced by a fresh one in which the recorded commands run again. If every command shows the policy
what it showed before, the trajectory goes on as if nothing had happened; otherwise it cannot, and is lost.
Called by the agent loop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megathunder.errors import InfrastructureFailure
from megathunder.tasks import Task, TaskFile

log = logging.getLogger(__name__)
SETUP_S = 60.0  # for a task's own preparation


class CommandResult(Protocol):
    output: str
    exit_status: int
    notice: str
    wall_s: float


class Sandbox(Protocol):
    """What is used of sandbox.Sandbox."""

    async def exec(self, command: str, deadline_s: float) -> CommandResult: ...

    async def restart(self) -> None:
        """A clean sandbox from here on: what ran in this one is forgotten."""
        await self.close()
        self._history.clear()

    async def close(self) -> None: ...


class Sandboxes(Protocol):
    """What is used of sandbox.SandboxPool."""

    async def lease(self, files: Sequence[TaskFile], image: str) -> Sandbox: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command, its limit, and what it showed."""

    command: str
    limit_s: float
    output: str
    notice: str


class Workspace:
    """`async with`-less by design: the agent loop closes it after grading."""

    def __init__(self, pool: Sandboxes, task: Task, *, max_replays: int) -> None:
        self._pool, self._task, self._replays_left = pool, task, max_replays
        self._history: list[Ran] = []
        self._said = ""  # how it failed last: what fails twice in one way fails a third time
        self.sandbox: Sandbox | None = None

    async def run(self, command: str, limit_s: float) -> CommandResult:
        """Run one command; replaces the sandbox when it fails. Raises InfrastructureFailure when that does not help."""
        if self._task.folder:
            command = f"cd {self._task.folder}; {command}"
        while True:
            try:
                result = await (await self.ready()).exec(command, limit_s)
            except InfrastructureFailure as failure:
                await self.fail(failure)
                continue
            self._history.append(Ran(command=command, limit_s=limit_s, output=result.output, notice=result.notice))
            return result

    async def ready(self) -> Sandbox:
        """The sandbox in the state the recorded commands left."""
        while self.sandbox is None:
            try:
                self.sandbox = await self._pool.lease(self._task.files, self._task.image)
                if self._task.setup:
                    await self.sandbox.exec(self._task.setup, SETUP_S)
                await self._replay(self.sandbox)
            except InfrastructureFailure as failure:
                await self.fail(failure)
        return self.sandbox

    async def fail(self, failure: InfrastructureFailure) -> None:
        """Give the sandbox up; raises `failure` when no replay is left."""
        await self.close()
        if self._replays_left == 0 or str(failure) == self._said:
            raise failure
        self._said = str(failure)
        self._replays_left -= 1
        log.warning("task %s: %s; replaying %d commands", self._task.id, failure, len(self._history))

    async def restart(self) -> None:
        """A clean sandbox from here on: what ran in this one is forgotten."""
        await self.close()
        self._history.clear()

    async def close(self) -> None:
        """End the sandbox. Idempotent."""
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def _replay(self, sandbox: Sandbox) -> None:
        for ran in self._history:
            result = await sandbox.exec(ran.command, ran.limit_s)
            if (result.output, result.notice) != (ran.output, ran.notice):
                self._replays_left = 0
                raise InfrastructureFailure(
                    f"task {self._task.id}: {ran.command!r} showed {result.output[:80]!r} in a fresh sandbox, "
                    f"{ran.output[:80]!r} before"
                )
