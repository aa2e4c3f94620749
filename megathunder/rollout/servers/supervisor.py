"""A pool of rollout servers: started here or given by address, watched, restarted, and offered while they are ready.

    STARTING -> READY -> DOWN -> (restarted, weights sent again) READY -> ...
                              -> LOST  (restarts used up; a restart that fails counts)

A server that comes back has a higher `incarnation` and gets no work before `on_restart` has returned: the coordinator
sends it the current weights there. Called by the coordinator; the agents wait on `wait_ready`.
Refuses a missing model folder and a port in use before anything is started.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from pathlib import Path

import aiohttp

from megathunder import background, tracing
from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.errors import ConfigError, InfrastructureFailure, UserError
from megathunder.processes import url_of
from megathunder.rollout.servers.command import choose_port, resolve_device
from megathunder.rollout.servers.server import ServerProcess, authorization, can_generate, is_healthy, start_server
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)

OnRestart = Callable[[ServerAddress], Awaitable[None]]
PROBE_EVERY_S = 2.0
PORT_TAKEN, PORT_ATTEMPTS = "EADDRINUSE", 3


class ServerState(Enum):
    """Where a server is in its life."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    LOST = "lost"


class Slot:
    """One place of the pool and the server that holds it (`process` is None for a server given by address)."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self.state = ServerState.STARTING
        self.process: ServerProcess | None = None
        self.restarts = 0
        self.probe_requested = asyncio.Event()
        self.unhealthy_reason = ""
        self.generation_check: asyncio.Task[bool] | None = None  # whether it samples


class ServerPool:
    """Servers named `<name>-<i>` of one model. `policy_version` is what a started server calls its first weights;
    `first_index` servers of other pools take the GPUs before this one's. `speculation`: started servers draft."""

    def __init__(
        self,
        config: RolloutConfig,
        model: Path,
        *,
        folder: Path,
        name: str = "rollout",
        urls: tuple[str, ...] | None = None,
        servers: int | None = None,
        first_index: int = 0,
        policy_version: int = 0,
        on_restart: OnRestart | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self._config, self._folder, self._name = config, folder, name
        self.model = model
        self._urls = config.urls if urls is None else urls
        self._count = config.servers if servers is None else servers
        self._version, self._on_restart, self._first_index = policy_version, on_restart, first_index
        self._speculation = speculation
        self._slots: list[Slot] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self.listeners: list[Callable[[], None]] = []  # called when a server comes, goes or is lost
        self._session: aiohttp.ClientSession | None = None

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        """Every server that is not lost, ready or not."""
        return tuple(s.address for s in self._slots if s.state is not ServerState.LOST)

    @property
    def ready(self) -> tuple[ServerAddress, ...]:
        """The servers that may get work now."""
        return tuple(s.address for s in self._slots if s.state is ServerState.READY)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Leaders of the process groups this pool started."""
        return tuple(s.process.pid for s in self._slots if s.process is not None)

    async def start(self) -> None:
        """Start (or find) every server; returns when all are ready, leaves nothing running when one fails."""
        self._session = aiohttp.ClientSession(headers=authorization(self._config.api_key))
        try:
            if self._urls:
                self._slots = [self._slot(i, url.rstrip("/")) for i, url in enumerate(self._urls)]
                await asyncio.gather(*map(self._find, self._slots))
            else:
                await self._start_processes()
        except BaseException:
            await self.close()
            raise
        self._watchers = [
            background.start(self._watch(slot), f"the watch over {slot.address.name}") for slot in self._slots
        ]

    async def wait_ready(self, timeout_s: float) -> tuple[ServerAddress, ...]:
        """The ready servers, as soon as there is one; InfrastructureFailure when none is left or none comes in time."""
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while not self.ready:
                if not self.servers:
                    raise InfrastructureFailure(f"every {self._name} server is lost; see the logs in {self._folder}")
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._changed.wait()
                except TimeoutError:
                    raise InfrastructureFailure(f"no {self._name} server was ready within {timeout_s:.0f} s") from None
        return self.ready

    def probe_now(self, server: ServerAddress) -> None:
        """A request to `server` failed: probe it now."""
        for slot in self._slots:
            if slot.address == server:
                slot.probe_requested.set()

    async def can_generate(self, server: ServerAddress) -> bool:
        """Whether `server`, which did not answer a request in time, samples at all; concurrent callers share
        one probe. One that hangs is marked unhealthy. True for an address outside the pool (a router)."""
        slot = next((s for s in self._slots if s.address.name == server.name), None)
        if slot is None:
            return True
        if slot.address != server or slot.state is not ServerState.READY:
            return False
        if slot.generation_check is None or slot.generation_check.done():
            asked = can_generate(self._session, server.url, timeout_s=self._config.health_timeout_s)
            slot.generation_check = asyncio.create_task(asked)
        if await asyncio.shield(slot.generation_check):
            return True
        if slot.address == server:
            self.mark_unhealthy(server, "requests got no answer in time, and nothing comes out of its scheduler")
        return False

    def mark_unhealthy(self, server: ServerAddress, reason: str) -> None:
        """`server` lives and must not be used as it is: no work from now on; it is restarted and gets the weights."""
        for slot in self._slots:
            if slot.address == server and slot.state is ServerState.READY:
                slot.state, slot.unhealthy_reason = ServerState.DOWN, reason
                slot.probe_requested.set()

    async def close(self) -> None:
        """Stop watching and end every server this pool started. Idempotent."""
        ending = [*self._watchers, *(slot.generation_check for slot in self._slots if slot.generation_check)]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await asyncio.gather(*(slot.process.kill() for slot in self._slots if slot.process))
        for slot in self._slots:
            slot.process = None
            slot.state = ServerState.LOST
        if self._session:
            await self._session.close()

    def _slot(self, index: int, url: str) -> Slot:
        return Slot(ServerAddress(name=f"{self._name}-{index}", url=url))

    async def _start_processes(self) -> None:
        if not (self.model / "config.json").is_file():
            raise ConfigError(
                f"no config.json in {self.model}",
                expected="a Hugging Face model folder",
                remedy="give the folder that holds config.json and the weights",
            )
        base, host = self._config.port, self._config.host
        ports = [choose_port(host, base + i if base else 0) for i in range(self._count)]
        self._slots = [self._slot(i, url_of(host, port)) for i, port in enumerate(ports)]
        self._folder.mkdir(parents=True, exist_ok=True)
        starts = [asyncio.create_task(self._launch(slot, port)) for slot, port in zip(self._slots, ports)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        for slot in self._slots:
            await self._enter(slot, ServerState.READY)

    async def _launch(self, slot: Slot, port: int) -> None:
        """Start it; again where another program took a port that the server had chosen for itself."""
        for attempt in range(PORT_ATTEMPTS):
            try:
                await self._start(slot, port)
                return
            except UserError as error:
                if PORT_TAKEN not in str(error) or attempt + 1 == PORT_ATTEMPTS:
                    raise
                log.warning("server %s found a port taken while it started; starting it again", slot.address.name)

    async def _start(self, slot: Slot, port: int) -> None:
        with tracing.span(slot.address.name, "start server"):
            slot.process = await start_server(
                self._config,
                model=self.model,
                port=port,
                device=resolve_device(self._config.device),
                version=self._version,
                log=self._folder / f"{slot.address.name}.log",
                index=self._first_index + self._slots.index(slot),
                speculation=self._speculation,
            )

    async def _find(self, slot: Slot) -> None:
        if not await is_healthy(self._session, slot.address.url, timeout_s=min(4.0, self._config.request_timeout_s)):
            raise UserError(
                f"no healthy server at {slot.address.url}",
                expected="an SGLang server that answers /health with 200",
                remedy="start it, mend the address (rollout.urls), or leave the addresses empty to start servers here",
            )
        await self._enter(slot, ServerState.READY)

    async def _enter(self, slot: Slot, state: ServerState) -> None:
        tracing.mark(slot.address.name, state.value)
        async with self._changed:
            slot.state = state
            self._changed.notify_all()
        for listener in self.listeners:
            listener()

    async def _watch(self, slot: Slot) -> None:
        while True:
            reason = await self._until_dead(slot)
            log.warning("server %s is down: %s", slot.address.name, reason)
            await self._enter(slot, ServerState.DOWN)
            if not await self._comes_back(slot):
                log.error("server %s is lost: max_restarts=%d", slot.address.name, self._config.max_restarts)
                await self._enter(slot, ServerState.LOST)
                return
            await self._enter(slot, ServerState.READY)

    async def _comes_back(self, slot: Slot) -> bool:
        """Start it, as often as the restarts of this run allow, until it is back and has the weights."""
        while slot.restarts < self._config.max_restarts:
            slot.restarts += 1
            try:
                await self._recover(slot)
            except Exception as error:  # the edge to another process and to the caller's callback
                log.error("restart %d of server %s failed: %s", slot.restarts, slot.address.name, error)
            else:
                return True
        return False

    async def _until_dead(self, slot: Slot) -> str:
        """Returns why the server counts as dead: its process ended, it refused a probe made on suspicion, or it
        answered none for `health_timeout_s`."""
        answered = time.monotonic()
        limit_s = self._config.health_timeout_s
        while time.monotonic() - answered < limit_s:
            if await self._process_ended(slot):
                return f"its process ended with status {slot.process.exit_status}"
            probe_requested = slot.probe_requested.is_set()
            slot.probe_requested.clear()
            if slot.unhealthy_reason:
                reason, slot.unhealthy_reason = slot.unhealthy_reason, ""
                return reason
            if await is_healthy(self._session, slot.address.url, timeout_s=limit_s / 2):
                answered = time.monotonic()
            elif probe_requested and slot.process is None:
                return "requests to it failed, and a health request too"
        return f"it answered no health request for {limit_s:.0f} s"

    async def _process_ended(self, slot: Slot) -> bool:
        """Wait for one probe interval, less if the server is probe_requested; whether its process ended."""
        waits = [asyncio.ensure_future(slot.probe_requested.wait())]
        if slot.process is not None:
            waits.append(asyncio.ensure_future(slot.process.exited()))
        try:
            await asyncio.wait(waits, timeout=PROBE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return slot.process is not None and slot.process.exit_status is not None

    async def _recover(self, slot: Slot) -> None:
        if self._urls:
            await self._until_back(slot)
        else:
            if slot.process is not None:
                await slot.process.kill()
                slot.process = None
            await self._launch(slot, int(slot.address.url.rpartition(":")[2]))
        old = slot.address
        slot.address = ServerAddress(name=old.name, url=old.url, incarnation=old.incarnation + 1)
        if self._on_restart is not None:
            await self._on_restart(slot.address)

    async def _until_back(self, slot: Slot) -> None:
        deadline = time.monotonic() + self._config.startup_timeout_s
        while not await can_generate(self._session, slot.address.url, timeout_s=self._config.health_timeout_s):
            if time.monotonic() > deadline:
                raise InfrastructureFailure(f"{slot.address.url} did not come back in time")
            await asyncio.sleep(PROBE_EVERY_S)
