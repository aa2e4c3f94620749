"""What a sandbox can do, whatever isolates it. Called by rollout/, sandbox.grading and evaluation/.

A sandbox belongs to one episode: files persist from command to command, processes do not. The agent's own faults are
results (`ExecResult.fault`); faults of the machinery are raised as InfrastructureFailure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from megathunder.tasks import TaskFile

NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did.

    `output` is standard output and error in the order written, invalid UTF-8 as U+FFFD; of a long one the head and
    the tail, with `dropped_bytes` missing between them. `exit_status` is 128 + signal for a killed command.
    `fault` is empty, or names the limit that ended the command (timeout, memory, files, died), or why it was not run.
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
        """What the policy is told beside the output: the limit that ended the command, or for which it was not run."""
        if not self.fault:
            return ""
        return self.fault if self.fault.startswith(NOT_RUN) else f"stopped: {self.fault}"


def too_long(command_bytes: int, most: int) -> ExecResult:
    """Of a command that is not run, since a part of it would do something else."""
    fault = f"{NOT_RUN}: a command of {command_bytes:,} bytes, at most {most:,} are allowed"
    return ExecResult(output="", exit_status=126, wall_s=0.0, cpu_s=0.0, fault=fault)


class Sandbox(Protocol):
    """One isolated work folder in which commands run one after the other."""

    async def start(self, files: Iterable[TaskFile] = ()) -> None:
        """Makes the sandbox ready with `files` in its work folder. Raises InfrastructureFailure."""

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        """Runs a bash command; when this returns, no process of it is left. Raises InfrastructureFailure."""

    async def upload(self, files: Iterable[TaskFile]) -> None:
        """Writes files with the agent's rights. Raises InfrastructureFailure if one cannot be written."""

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        """A regular file of the work folder, or None if there is none of at most `max_bytes`."""

    async def close(self) -> None:
        """Ends every process and forgets the files; a second call, or one after expiry, does nothing."""


class Leases(Protocol):
    """Gives out sandboxes."""

    async def lease(self, files: Iterable[TaskFile] = (), image: str = "") -> Sandbox:
        """A started, clean sandbox with `files`; `image` is what its task asks for, where there are images."""


class Pool(Leases, Protocol):
    """Where sandboxes come from: this process (`pool.py`) or other machines (`remote.py`)."""

    async def start(self) -> None:
        """Measures the isolation; raises IsolationError, with the remedy, where it does not hold."""

    async def close(self) -> None:
        """Ends every sandbox. Idempotent."""

    def leaks(self) -> list[str]:
        """What is left of sandboxes outside a command, one line each; empty when all is well."""


class Member(Sandbox, Protocol):
    """A sandbox as its pool sees it."""

    slot: int  # unique among the open ones of a pool
    healthy: bool  # its answers are in step

    @property
    def alive(self) -> bool:
        """Whether it can be given out."""

    @property
    def reusable(self) -> bool:
        """Whether `clear` leaves nothing that the next episode could meet."""

    async def clear(self) -> None:
        """Ends what runs and empties what can be written; raises InfrastructureFailure if something is left."""


class Backend(Protocol):
    """What isolates: makes the members of one pool."""

    async def probe(self) -> None:
        """Measures the isolation; raises IsolationError."""

    def make(self, slot: int, image: str) -> Member:
        """A sandbox that is not started yet."""

    def image_of(self, image: str) -> str:
        """The image that a task's wish comes to: its own name, the default one, or "" where there are none."""

    def leaks(self, slots: int) -> list[str]:
        """See Pool.leaks; the pool's slots are 0 .. slots - 1."""

    def close(self) -> None:
        """Frees what the backend itself holds."""
