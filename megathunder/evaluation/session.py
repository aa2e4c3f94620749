"""Servers, sandboxes and a collector for evaluating policies one after the other.

    async with open_session(config, folder, logs) as session:
        await session.make(tasks, attempts, log)              with the policy of `folder`
        await session.load(other, version)                    the same servers, other weights of the same architecture
        await session.make(...)

Called by tools/evaluate.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megathunder.config import Config
from megathunder.errors import ConfigError
from megathunder.evaluation.attempts import LIMITS, Attempt, AttemptLog, Plan
from megathunder.evaluation.runner import run_attempts
from megathunder.rewards.grading import grade
from megathunder.rollout import Collector, ServerControl, ServerPool
from megathunder.sandbox import Pool, open_pool
from megathunder.tasks import ChatFormat, Task

log = logging.getLogger(__name__)
EVERY = 10  # attempts between two lines of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What evaluates."""

    config: Config
    servers: ServerPool
    control: ServerControl
    collector: Collector

    async def load(self, folder: Path, version: int) -> None:
        """Give every server the weights of a model folder that it can read."""
        for server in self.servers.ready:
            info = await self.control.open_update(server)
            await self.control.update_from_disk(server, folder=str(folder), version=version)
            await self.control.close_update(server, info)

    async def make(self, tasks: Sequence[Task], attempts: int, log: AttemptLog) -> None:
        """Make the attempts that `log` does not have."""
        left = missing(tasks, attempts, log)

        def on_end(attempt: Attempt) -> None:
            nonlocal left
            log.add(attempt)
            left -= 1
            if left % EVERY == 0:
                print(f"  {left} attempts left", flush=True)

        version = await self._version()
        await run_attempts(self.collector, tasks, attempts, on_end, policy_version=version, finished=log.finished)

    async def _version(self) -> int:
        """The one version that every server holds; servers given by address may hold any."""
        versions = {server.name: await self.control.version(server) for server in self.servers.ready}
        if len(set(versions.values())) != 1:
            raise ConfigError(
                f"the servers hold different versions: {versions}",
                expected="one policy",
                remedy="give servers of one policy (rollout.urls), or leave the addresses empty to start some",
            )
        return next(iter(versions.values()))


@contextlib.asynccontextmanager
async def open_session(config: Config, folder: Path, logs: Path) -> AsyncIterator[Session]:
    """Everything started for the policy in `folder`, and ended on the way out. Servers write to `logs`."""
    from transformers import AutoTokenizer  # seconds to import

    async with contextlib.AsyncExitStack() as stack:
        sandboxes = open_pool(config.sandbox)
        stack.push_async_callback(sandboxes.close)
        await sandboxes.start()
        stack.push_async_callback(end_sandboxes, sandboxes)
        servers = ServerPool(config.rollout, folder, folder=logs, speculation=config.drafting)
        stack.push_async_callback(servers.close)
        await servers.start()
        collector = Collector(
            config.rollout,
            config.sandbox,
            servers=servers,
            sandboxes=sandboxes,
            grade=grade,
            chat=ChatFormat(AutoTokenizer.from_pretrained(folder)),
            seed=config.run.seed,
            reward=config.reward,
            tasks=config.tasks,
            logs=logs,
        )
        await stack.enter_async_context(collector)
        control = ServerControl(timeout_s=config.rollout.request_timeout_s, api_key=config.rollout.api_key)
        await stack.enter_async_context(control)
        yield Session(config=config, servers=servers, control=control, collector=collector)


async def end_sandboxes(sandboxes: Pool) -> None:
    """Ends them, and says what is left of them."""
    await sandboxes.close()
    for leak in sandboxes.leaks():
        log.error("a sandbox left something behind: %s", leak)


def missing(tasks: Sequence[Task], attempts: int, log: AttemptLog) -> int:
    """How many attempts `log` does not have."""
    return sum(not log.finished(task.id, number) for task in tasks for number in range(attempts))


def plan_of(config: Config, folder: Path, tasks: Sequence[Task]) -> Plan:
    """Digests of what is evaluated, and the settings that an outcome depends on."""
    weights = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja")):
        weights.update(path.name.encode() + path.read_bytes())
    return Plan(
        checkpoint=weights.hexdigest(),
        tasks=hashlib.blake2b(b"".join(task.digest_bytes for task in tasks), digest_size=16).hexdigest(),
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        limits=" ".join(f"{name}={getattr(config.rollout, name)}" for name in LIMITS),
    )
