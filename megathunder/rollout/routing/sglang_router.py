"""SGLang's own router in front of the same servers: a process that chooses by a prefix tree of its own (`cache_aware`).

    SglangRouter(pool).assign(...) -> the router's address, at once

It forwards generation only, so control and weights still go to each server. It starts with the first request and ends
with `close` (or with this process, however that ends). A router whose process ended is started again, up to RESTARTS
times. Its balance thresholds are those under which it uses several servers at low load too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys

import aiohttp

from megathunder.errors import InfrastructureFailure
from megathunder.processes import guarded, kill_family, url_of
from megathunder.rollout.routing.request import Request
from megathunder.rollout.routing.request_router import Assignment, Pool
from megathunder.rollout.servers.command import choose_port
from megathunder.types import ServerAddress, TrajectoryId

PACKAGE, NAME = "sglang_router", "sglang-router"
START_S, RESTARTS = 60.0, 3
ARGUMENTS = {
    "policy": "cache_aware",
    "balance_abs_threshold": "2",
    "balance_rel_threshold": "1.2",
    "cache_threshold": "0.5",
    "worker_startup_check_interval": "1",
    "health_check_interval_secs": "5",
    "log_level": "warn",
}


class SglangRouter:
    """Starts `python -m sglang_router.launch_router` over the pool's servers when the first request comes."""

    def __init__(self, pool: Pool, *, api_key: str = "", host: str = "127.0.0.1") -> None:
        self._pool, self._api_key, self._host = pool, api_key, host
        self._serial, self._starts = itertools.count(), 0
        self._process: asyncio.subprocess.Process | None = None
        self._address = ServerAddress(name=NAME, url="")
        self._starting = asyncio.Lock()

    async def assign(self, trajectory: TrajectoryId, tokens: int, version: int) -> Assignment:
        """The router, running."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()
        request = Request(trajectory=trajectory, tokens=tokens, version=version, serial=next(self._serial))
        return Assignment(request=request, server=self._address)

    def done(self, assignment: Assignment) -> None:
        """The router counts for itself."""

    def release(self, trajectory: TrajectoryId) -> None:
        """The router knows prefixes, not trajectories."""

    async def close(self) -> None:
        """End the router. Idempotent."""
        if self._process is not None and self._process.returncode is None:
            await kill_family(self._process)
        self._process = None

    async def _start(self) -> None:
        if self._starts > RESTARTS:
            raise InfrastructureFailure(f"{NAME} ended {self._starts} times")
        self._starts += 1
        port, metrics_port = (choose_port(self._host, 0) for _ in range(2))
        arguments = {**ARGUMENTS, "host": self._host, "port": str(port), "prometheus_port": str(metrics_port)}
        flags = [part for key, value in arguments.items() for part in ("--" + key.replace("_", "-"), value)]
        flags += ["--worker-urls", *(server.url for server in self._pool.servers)]
        flags += ["--api-key", self._api_key] if self._api_key else []
        self._process = await asyncio.create_subprocess_exec(
            *guarded([sys.executable, "-m", f"{PACKAGE}.launch_router", *flags]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self._address = ServerAddress(name=NAME, url=url_of(self._host, port), incarnation=self._starts)
        await self._until_healthy()

    async def _until_healthy(self) -> None:
        """Wait until it forwards to a healthy server."""
        try:
            async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
                while self._process.returncode is None:
                    with contextlib.suppress(aiohttp.ClientError, OSError):
                        async with session.get(self._address.url + "/readiness") as response:
                            if response.status == 200:
                                return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            await self.close()
            raise InfrastructureFailure(f"{NAME} was not ready within {START_S:.0f} s") from None
        raise InfrastructureFailure(f"{NAME} ended with status {self._process.returncode} while it started")
