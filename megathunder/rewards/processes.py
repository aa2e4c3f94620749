"""A reward function in processes of its own: what takes too long is ended, and another process takes its place.

    this process   -> 4 bytes of length, MessagePack (completion, row, trajectory)      -> worker.py's standard input
    worker.py      -> 4 bytes of length, MessagePack {"value": ...} or {"error": ...}    -> here

Called by scorer.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from megathunder.config.reward import RewardConfig
from megathunder.rewards import frames
from megathunder.rewards.functions import NamedReward
from megathunder.user_code import UserCodeFailure, too_slow

HEADER = struct.Struct(">I")
START_S = 60.0  # for the imports of the function's file


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    process: asyncio.subprocess.Process
    started: bool = False


class RewardProcesses:
    """Up to `reward.processes` workers of one function."""

    def __init__(self, function: NamedReward, config: RewardConfig) -> None:
        self._function, self._limit_s = function, config.timeout_s
        self._free = asyncio.Semaphore(config.processes)
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()

    async def call(self, *arguments: object) -> Any:
        """What the function gives. Raises UserCodeFailure."""
        async with self._free:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await self._ask(worker, arguments)
            except BaseException:
                await self._end(worker)
                raise
            self._idle.append(worker)
        if "error" in answer:
            raise UserCodeFailure(
                str(self._function),
                answer["error"],
                answer["traceback"],
                "correct the code at the last line of the traceback",
            )
        return answer["value"]

    async def close(self) -> None:
        """End all workers."""
        for worker in [*self._all]:
            await self._end(worker)

    async def _start(self) -> Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "megathunder.rewards.worker", self._function.reference, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = Worker(process=process)
        self._all.add(worker)
        return worker

    async def _ask(self, worker: Worker, arguments: tuple[object, ...]) -> dict[str, Any]:
        data = frames.encode(arguments)
        limit_s = self._limit_s if worker.started else self._limit_s + START_S
        assert worker.process.stdin and worker.process.stdout, "both are pipes"
        try:
            async with asyncio.timeout(limit_s):
                worker.process.stdin.write(HEADER.pack(len(data)) + data)
                await worker.process.stdin.drain()
                (length,) = HEADER.unpack(await worker.process.stdout.readexactly(HEADER.size))
                answer = msgspec.msgpack.decode(await worker.process.stdout.readexactly(length))
        except TimeoutError:
            raise too_slow(str(self._function), limit_s, "reward.timeout_s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await worker.process.wait()
            raise UserCodeFailure(
                str(self._function),
                f"ended its process with status {status}",
                "",
                "see its last lines above; it must return or raise",
            ) from None
        worker.started = True
        return answer

    async def _end(self, worker: Worker) -> None:
        self._all.discard(worker)
        with contextlib.suppress(ProcessLookupError):
            worker.process.kill()
        await worker.process.wait()
