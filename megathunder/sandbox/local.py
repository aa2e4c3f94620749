"""A sandbox on this machine: one living bubblewrap with a supervisor that runs one command at a time.

    request  op, length, payload   ->   answer  op, length, payload      (see supervisor.pl for the payloads)

A lost connection or a missing answer is a fault of the machinery where the agent cannot reach the supervisor (own uid);
in a user namespace it may be the agent's doing, so there it is the result `fault="died"`. Called by sandbox.backends.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import time
from collections.abc import Iterable

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.sandbox.bubblewrap import Identity, identity, spawn
from megathunder.sandbox.interface import ExecResult, too_long
from megathunder.sandbox.output import joined
from megathunder.tasks import TaskFile

GRACE_S = 10.0  # for an answer, beyond the limit that the supervisor itself keeps
KILLED_S = 4.0  # until a killed process is gone
FRAME = struct.Struct(">cI")
MAX_COMMAND_BYTES = 100_000  # the kernel refuses arguments of 128 KiB


async def ended(process: subprocess.Popen, within_s: float) -> bool:
    """Waits for it to end, at most `within_s`; whether it has."""
    limit = time.monotonic() + within_s
    while process.poll() is None:
        if time.monotonic() > limit:
            return False
        await asyncio.sleep(0.002)
    return True


class LocalSandbox:
    """One bubblewrap sandbox. `slot` is unique among the open sandboxes of this process."""

    def __init__(self, config: SandboxConfig, slot: int) -> None:
        self._config, self.slot = config, slot
        self.identity: Identity = identity(slot)
        self.healthy = False
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._entered = False  # the supervisor has answered: bwrap is no longer setting up
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._busy = asyncio.Lock()

    async def start(self, files: Iterable[TaskFile] = (), errors: int = subprocess.DEVNULL) -> None:
        """Starts the processes and writes `files`; raises InfrastructureFailure."""
        self._process, self._connection = spawn(self._config, self.identity, errors)
        self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
        self.healthy = True
        await self.upload(files)
        self._entered = True

    @property
    def reusable(self) -> bool:
        """Whether no command can touch the supervisor that cleans."""
        return self.identity.own_uid

    @property
    def alive(self) -> bool:
        """Whether its process runs and its answers are in step."""
        return self.healthy and self._process is not None and self._process.poll() is None

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        """Runs `command` with bash for at most `deadline_s` seconds."""
        started = time.monotonic()
        text = command.replace("\0", "").encode(errors="replace")
        if len(text) > MAX_COMMAND_BYTES:
            return too_long(len(text), MAX_COMMAND_BYTES)
        header = f"{deadline_s:.3f} {self._config.output_bytes}\n".encode()
        try:
            answer = await self._ask(b"X", header + text, deadline_s + GRACE_S)
        except InfrastructureFailure:
            if self.identity.own_uid:
                raise
            wall_s = time.monotonic() - started
            return ExecResult(output="", exit_status=137, wall_s=wall_s, cpu_s=0.0, fault="died")
        line, _, output = answer.partition(b"\n")
        status, signal, cpu_us, dropped, head, fault = line.split()
        return ExecResult(
            output=joined(output, int(head), int(dropped)),
            exit_status=128 + int(signal) if int(signal) else int(status),
            wall_s=time.monotonic() - started,
            cpu_s=int(cpu_us) / 1e6,
            dropped_bytes=int(dropped),
            fault="" if fault == b"-" else fault.decode(),
        )

    async def upload(self, files: Iterable[TaskFile]) -> None:
        """Writes `files`, making their folders; raises InfrastructureFailure with the supervisor's words."""
        parts = []
        for file in files:
            path, content = (text.encode(errors="surrogateescape") for text in (file.path, file.content))
            parts += [struct.pack(">II", file.mode, len(path)), path, struct.pack(">I", len(content)), content]
        error = await self._ask(b"W", b"".join(parts), GRACE_S)
        if error:
            raise InfrastructureFailure(f"sandbox {self.slot}: {error.decode(errors='replace')}")

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        """The content of a regular file, or None."""
        answer = await self._ask(b"R", f"{max_bytes}\n{path}".encode(errors="replace"), GRACE_S)
        return answer[1:] if answer[:1] == b"+" else None

    async def clear(self) -> None:
        """Ends what runs and empties every writable folder; raises InfrastructureFailure if something is left."""
        error = await self._ask(b"C", b"", GRACE_S)
        if error:
            raise InfrastructureFailure(f"sandbox {self.slot}: {error.decode(errors='replace')}")

    async def close(self) -> None:
        """Ends the sandbox; the kernel ends everything in its pid namespace with it. One that is still starting is not
        killed (see bubblewrap.py): its supervisor finds the socket closed, and ends by itself."""
        process, self._process, self.healthy = self._process, None, False
        if process is None:
            return
        if self._writer is not None:
            self._writer.transport.abort()
        elif self._connection is not None:
            self._connection.close()
        if not self._entered and await ended(process, GRACE_S):
            return
        process.kill()
        if not await ended(process, KILLED_S):
            raise InfrastructureFailure(f"sandbox {self.slot}: bwrap (pid {process.pid}) does not die")

    async def _ask(self, op: bytes, payload: bytes, within_s: float) -> bytes:
        async with self._busy:
            if not self.healthy or self._reader is None or self._writer is None:
                raise InfrastructureFailure(f"sandbox {self.slot} is not running")
            try:
                self._writer.write(FRAME.pack(op, len(payload)) + payload)
                async with asyncio.timeout(within_s):
                    await self._writer.drain()
                    _, size = FRAME.unpack(await self._reader.readexactly(FRAME.size))
                    return await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                self.healthy = False
                raise InfrastructureFailure(f"sandbox {self.slot} died") from error
            except TimeoutError as error:
                self.healthy = False
                raise InfrastructureFailure(f"sandbox {self.slot} gave no answer within {within_s:.1f} s") from error
            except asyncio.CancelledError:
                self.healthy = False  # an answer may be under way: the stream cannot be used again
                raise
