"""Builds the parts of a run in an order in which each can still refuse cheaply, and takes them down in reverse.

    tokenizer, task source, isolation probe (about 1 s) -> servers (tens of seconds, beside the learner's own start)
    -> learner cells

Called by the coordinator process. Whatever goes wrong while building or running, everything that was started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megathunder.config import Config
from megathunder.config.model_shape import ModelShape, read_model_shape
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.coordinator.persistence import Persistence
from megathunder.coordinator.sizing import GroupSizes
from megathunder.coordinator.speculation_monitor import Drafting, drafting
from megathunder.coordinator.supply import SampledSupply, Servers, Supply
from megathunder.coordinator.update_plan import ConfiguredUpdates, UpdatePlan
from megathunder.metrics.monitor import Monitor, open_monitor
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import Decode
from megathunder.objectives.base import Objective
from megathunder.objectives.build_objective import build_objective, needs_teacher
from megathunder.planning.flops import known_peak, measured_peak
from megathunder.rewards.grading import grade
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.routing import build_router
from megathunder.rollout.servers.command import resolve_device
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.sandbox import Pool, open_pool
from megathunder.tasks import ChatFormat, build_source, fitting
from megathunder.types import ServerAddress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNER_START_S = 300.0


OnRestart = Callable[[ServerAddress], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a run holds."""

    config: Config
    plan: UpdatePlan
    monitor: Monitor
    supply: Supply
    sizes: GroupSizes
    persistence: Persistence
    servers: Servers
    learner: LearnerClient
    shape: ModelShape
    peak_flops: float
    devices: int = 1  # GPUs, or machines where there are none, that the run holds
    drafting: Drafting | None = None
    objective: Objective | None = None  # with what it keeps from update to update; None: built when it is asked for
    publishes: bool = True  # False where trajectories come from a recording: no server samples with the weights

    def control(self) -> ServerControl:
        """The servers' control endpoints; use as an async context."""
        return ServerControl(timeout_s=self.config.rollout.request_timeout_s, api_key=self.config.rollout.api_key)


@contextlib.asynccontextmanager
async def assemble(config: Config, learner: LearnerClient, on_restart: OnRestart) -> AsyncIterator[Parts]:
    """Every part, started and connected; ended again on the way out. `on_restart` sends a server the weights."""
    folder = RunFolder(Path(config.run.folder) / config.run.name)
    tokenizer = _tokenizer(config.learner.model)
    async with contextlib.AsyncExitStack() as stack:
        chat = ChatFormat(tokenizer)
        source = fitting(build_source(config.tasks), config.tasks, chat, config.rollout.max_tokens)
        monitor = open_monitor(config, folder, _own_decoder(config.learner.model))
        stack.callback(monitor.close)
        sandboxes = open_pool(config.sandbox)
        stack.push_async_callback(sandboxes.close)
        await sandboxes.start()
        stack.push_async_callback(_end_sandboxes, sandboxes, monitor)
        with _phase(monitor, _server_words(config, folder)):
            servers, teacher = await _start_servers(config, folder, stack, on_restart)
        router = build_router(config.routing, config.rollout, servers)
        collector = await stack.enter_async_context(
            Collector(
                config.rollout,
                config.sandbox,
                servers=servers,
                sandboxes=sandboxes,
                grade=grade,
                chat=chat,
                seed=config.run.seed,
                reward=config.reward,
                tasks=config.tasks,
                logs=folder.path / "logs",
                teacher=teacher,
                router=router,
            )
        )
        drafts = await stack.enter_async_context(drafting(config.drafting, servers, config.rollout.api_key))
        with _phase(monitor, f"waiting for the learner to load {config.learner.model}"):
            await learner.connect(LEARNER_START_S)
        sizes = GroupSizes(config)
        supply = SampledSupply(config, source, collector, sizes)
        objective = build_objective(config)
        persistence = Persistence(
            config=config, folder=folder, learner=learner, supply=supply, controls=(sizes, objective)
        )
        stack.push_async_callback(persistence.abandon)
        yield Parts(
            config=config,
            plan=ConfiguredUpdates(config),
            monitor=monitor,
            supply=supply,
            sizes=sizes,
            persistence=persistence,
            servers=servers,
            learner=learner,
            shape=read_model_shape(config.learner.model),
            peak_flops=peak_flops(config, learner),
            devices=_devices(config, learner),
            drafting=drafts,
            objective=objective,
        )


async def _start_servers(
    config: Config, folder: RunFolder, stack: contextlib.AsyncExitStack, on_restart: OnRestart
) -> tuple[ServerPool, ServerPool | None]:
    """The rollout servers, and the teacher's where there is one, at once."""
    logs = folder.path / "logs"
    servers = ServerPool(
        config.rollout,
        Path(config.learner.model),
        folder=logs,
        on_restart=on_restart,
        speculation=config.drafting,
    )
    pools = [servers]
    if needs_teacher(config):
        urls, model = config.opd.teacher_urls, Path(config.opd.teacher)
        after = 0 if config.rollout.urls else config.rollout.servers
        pools.append(
            ServerPool(config.rollout, model, folder=logs, name="teacher", urls=urls, servers=1, first_index=after)
        )
    for pool in pools:
        stack.push_async_callback(pool.close)
    await asyncio.gather(*(pool.start() for pool in pools))
    return servers, pools[1] if len(pools) > 1 else None


def _server_words(config: Config, folder: RunFolder) -> str:
    teacher = " and the teacher's" if needs_teacher(config) else ""
    if config.rollout.urls:
        return f"connecting to {len(config.rollout.urls)} rollout servers{teacher}"
    many = f"{config.rollout.servers} rollout servers" if config.rollout.servers > 1 else "a rollout server"
    return f"starting {many}{teacher} (logs: {folder.path / 'logs'})"


@contextlib.contextmanager
def _phase(monitor: Monitor, words: str) -> Iterator[None]:
    """A line when a phase of the start begins, and one when it has ended."""
    monitor.print(f"{words} ...")
    began_s = time.monotonic()
    yield
    monitor.print(f"  done after {time.monotonic() - began_s:.1f} s")


async def _end_sandboxes(sandboxes: Pool, monitor: Monitor) -> None:
    await sandboxes.close()
    for leak in sandboxes.leaks():
        monitor.print(f"a sandbox left something behind: {leak}")


def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # seconds to import: only the process that needs it pays

    return AutoTokenizer.from_pretrained(folder)


def _own_decoder(folder: str) -> Decode:
    """Decodes with a tokenizer of its own, loaded when it is first needed: it is called in another thread."""
    load = functools.cache(lambda: _tokenizer(folder))
    return lambda token_ids: load().decode(token_ids)


def peak_flops(config: Config, learner: LearnerClient) -> float:
    """FLOP/s of all learner ranks at their best: as set, as known of the GPU by its name (0 where it is not), or
    measured on this core."""
    if config.metrics.peak_flops:
        return config.metrics.peak_flops * learner.ranks
    if resolve_device(config.learner.device) == "cpu":
        return measured_peak() * learner.ranks
    return sum(known_peak(hello.device) * hello.ranks for hello in learner.hellos.values())


def _devices(config: Config, learner: LearnerClient) -> int:
    """GPUs of the learner, the servers and the teacher's; without GPUs the machines of the learner's cells."""
    if resolve_device(config.learner.device) == "cpu":
        return len({hello.host for hello in learner.hellos.values()})
    servers = len(config.rollout.urls) or config.rollout.servers
    teachers = (len(config.opd.teacher_urls) or 1) if needs_teacher(config) else 0
    return learner.ranks + (servers + teachers) * config.rollout.gpus_per_server
