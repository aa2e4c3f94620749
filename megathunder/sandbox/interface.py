"""What a sandbox can do, whatever isolates it. Called by rollout/, sandbox.grading and evaluation/.

A sandbox belongs to one episode: files persist from command to command, processes do not. The agent's own faults are
results (`ExecResult.fault`); faults of the machinery are raised as InfrastructureFailure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from megathunder.tasks import TaskFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    `output` is standard output and error in the order written, invalid UTF-8 as U+FFFD; of a long one the head and
    the tail, with `dropped_bytes` missing between them. `exit_status` is 128 + signal for a killed command.
    `fault` is empty, or names the limit that ended the command: timeout, memory, files, died.
    """

    output: str
    exit_status: int
    wall_s: float
    cpu_s: float
    dropped_bytes: int = 0
    fault: str = ""

    @property
    def timed_out(self) -> bool:
        return self.fault == "timeout"

    @property
    def notice(self) -> str:
        """What the policy is told beside the output: the limit that ended the command, if one did."""
        return f"stopped: {self.fault}" if self.fault else ""


class Sandbox(Protocol):
    """One isolated work folder in which commands run one after the other."""

    async def start(self, files: Iterable[TaskFile]) -> None:
        """Makes the sandbox ready with `files` in its work folder. Raises InfrastructureFailure."""

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        """Runs a bash command; when this returns, no process of it is left. Raises InfrastructureFailure."""

    async def upload(self, files: Iterable[TaskFile]) -> None:
        """Writes files with the agent's rights. Raises InfrastructureFailure if one cannot be written."""

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        """A regular file of the work folder, or None if there is none of at most `max_bytes`."""

    async def close(self) -> None:
        """Ends every process and forgets the files; a second call does nothing."""
