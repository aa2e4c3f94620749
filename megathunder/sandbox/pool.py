"""Leases of sandboxes: warm ones are kept ready, used ones are cleaned or ended, commands are capped, leaks are found.

    start() -> probe -> warm sandboxes;   lease(files) -> Leased -> close() -> cleaned and idle, or ended and replaced

A sandbox is used again only where its backend can clean it: under bubblewrap where each has its own uid, so that the
supervisor, which no command can touch, kills what runs, empties every writable folder and says so. Elsewhere each
episode gets a new one. A lease ends after `lifetime_s`, whatever its holder does.
At most `max_open` are leased and `max_running` commands run at a time; more wait. Called by rollout/ and evaluation/.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from megathunder import background
from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import ConfigError, InfrastructureFailure
from megathunder.sandbox.backends import build_backend
from megathunder.sandbox.bubblewrap import UIDS_PER_PROCESS
from megathunder.sandbox.interface import Backend, ExecResult, Member, Pool
from megathunder.sandbox.remote_pool import RemotePool
from megathunder.tasks import TaskFile


class Leased:
    """A Sandbox that goes back to its pool when closed, or is ended when its lifetime is over."""

    def __init__(self, pool: SandboxPool, sandbox: Member, lifetime_s: float) -> None:
        self._pool, self._sandbox, self._open, self._expired = pool, sandbox, True, False
        self._lifetime_s, self._expiry = lifetime_s, background.start(self._expire(), "the expiry of sandbox leases")

    async def start(self, files: Iterable[TaskFile] = ()) -> None:
        await self.upload(files)

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        async with self._pool.running:
            return await self._lent().exec(command, deadline_s)

    async def upload(self, files: Iterable[TaskFile]) -> None:
        await self._lent().upload(files)

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        return await self._lent().download(path, max_bytes)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._expiry.cancel()
            await self._pool.give_back(self._sandbox)

    async def _expire(self) -> None:
        await asyncio.sleep(self._lifetime_s)
        self._open, self._expired = False, True
        await self._pool.give_back(self._sandbox, expired=True)

    def _lent(self) -> Member:
        if not self._open:
            ending = f"is over (sandbox.lifetime_s = {self._lifetime_s:.0f})" if self._expired else "was closed"
            raise InfrastructureFailure(f"sandbox {self._sandbox.slot} {ending}")
        return self._sandbox


class SandboxPool:
    """The sandboxes of one process. Use from one event loop."""

    def __init__(self, config: SandboxConfig, backend: Backend | None = None) -> None:
        slots = 2 * config.max_open + config.warm + 2
        if slots > UIDS_PER_PROCESS:
            raise ConfigError(
                f"sandbox.max_open is {config.max_open} and sandbox.warm {config.warm}",
                expected=f"2 max_open + warm + 2 to be at most {UIDS_PER_PROCESS}, the uids of one process",
                remedy="lower sandbox.max_open",
            )
        self._config, self._slots = config, slots
        self._backend = backend or build_backend(config)
        self.running = asyncio.Semaphore(config.max_running)
        self._places = asyncio.Semaphore(config.max_open)
        self._idle: list[Member] = []
        self._lent: set[Member] = set()
        self._free_slots = list(reversed(range(slots)))
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Measures the isolation and warms up; raises IsolationError where it does not hold."""
        await self._backend.probe()
        await self._warm_up()

    async def lease(self, files: Iterable[TaskFile] = (), image: str = "") -> Leased:
        """A clean sandbox with `files`; waits while `max_open` are out. Raises InfrastructureFailure."""
        await self._places.acquire()
        try:
            sandbox = await self._holding(files, image)
        except BaseException:
            self._places.release()
            raise
        return Leased(self, sandbox, self._config.lifetime_s)

    async def _holding(self, files: Iterable[TaskFile], image: str) -> Member:
        """A lent sandbox with `files`. A warm one that turns out to be dead costs nobody a retry: the next is taken."""
        files = tuple(files)
        usual = self._backend.image_of(image) == self._backend.image_of("")  # the warm ones have the default image
        while True:
            warm = await self._waiting() if usual else None
            sandbox = warm or await self._new(image)
            self._lent.add(sandbox)
            self._refill()
            try:
                await sandbox.upload(files)
                return sandbox
            except BaseException as error:
                await self._take_back(sandbox)
                if warm is None or sandbox.healthy or not isinstance(error, InfrastructureFailure):
                    raise

    async def give_back(self, sandbox: Member, *, expired: bool = False) -> None:
        """Takes a leased sandbox back: cleaned if that is safe, ended otherwise."""
        try:
            await self._take_back(sandbox, expired=expired)
        finally:
            self._places.release()

    async def _take_back(self, sandbox: Member, *, expired: bool = False) -> None:
        try:
            if sandbox.reusable and sandbox.healthy and not self._closed and not expired:
                await sandbox.clear()
                self._lent.discard(sandbox)
                self._idle.append(sandbox)
            else:
                await self._end(sandbox)
        except InfrastructureFailure:
            await self._end(sandbox)
        except asyncio.CancelledError:
            await self._end(sandbox)
            raise

    async def close(self) -> None:
        """Ends every sandbox and waits until the kernel has ended their processes; safe to call twice."""
        self._closed = True
        if self._warming is not None:
            await asyncio.gather(self._warming, return_exceptions=True)
        await asyncio.gather(*(self._end(s) for s in [*self._idle, *self._lent]))
        for _ in range(100):
            if not self.leaks():
                break
            await asyncio.sleep(0.02)
        self._backend.close()

    def leaks(self) -> list[str]:
        """What is left of this pool's sandboxes outside a command, one line each; empty when all is well."""
        return self._backend.leaks(self._slots)

    async def _waiting(self) -> Member | None:
        """An idle sandbox that still lives; one that died unused costs nobody a retry."""
        while self._idle:
            sandbox = self._idle.pop()
            if sandbox.alive:
                return sandbox
            await self._end(sandbox)
        return None

    async def _new(self, image: str = "") -> Member:
        sandbox = self._backend.make(self._free_slots.pop(), image)
        try:
            await sandbox.start()
        except BaseException:
            await self._end(sandbox)
            raise
        return sandbox

    async def _end(self, sandbox: Member) -> None:
        self._lent.discard(sandbox)
        if sandbox in self._idle:
            self._idle.remove(sandbox)
        try:
            await sandbox.close()
        finally:
            self._free_slots.insert(0, sandbox.slot)  # used again last, when its uid is surely free

    def _refill(self) -> None:
        if len(self._idle) < self._config.warm and not self._closed and (self._warming is None or self._warming.done()):
            self._warming = asyncio.create_task(self._warm_up())

    async def _warm_up(self) -> None:
        while len(self._idle) < self._config.warm and len(self._idle) + len(self._lent) < self._config.max_open:
            if self._closed:
                return
            self._idle.append(await self._new())


def open_pool(config: SandboxConfig) -> Pool:
    """The pool that the settings ask for, of this machine or of others; not started yet."""
    return RemotePool(config) if config.backend == "remote" else SandboxPool(config)
