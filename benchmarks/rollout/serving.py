"""Servers to measure, and what they spent. Shared by the measurements of benchmarks/bench_rollout.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.types import ServerAddress


def machine() -> dict[str, object]:
    """What a table has to name."""
    model = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    return {"platform": platform.platform(), "cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server and the processes it consists of."""

    address: ServerAddress
    pool: ServerPool
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(sum(member.cpu_times()[:2]) for member in family)


@contextlib.asynccontextmanager
async def serving(
    config: RolloutConfig, model: Path, folder: Path, variants: dict[str, SpeculationConfig | None]
) -> AsyncIterator[dict[str, Served]]:
    """A server for each name of `variants`, drafting or not, started together and ended on the way out."""
    pools = {
        name: ServerPool(config, model, folder=folder, name=name, servers=1, speculation=speculation)
        for name, speculation in variants.items()
    }
    try:
        await asyncio.gather(*(pool.start() for pool in pools.values()))
        yield {name: Served(address=pool.ready[0], pool=pool, pid=pool.process_ids[0]) for name, pool in pools.items()}
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))


@contextlib.contextmanager
def stopwatch() -> contextlib.AbstractContextManager[list[float]]:
    """`with stopwatch() as wall_s:` puts the seconds the body took into `wall_s[0]`."""
    started, taken = time.perf_counter(), [0.0]
    yield taken
    taken[0] = time.perf_counter() - started
