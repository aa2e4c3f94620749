"""One publication to several servers at once: whoever fails is left out of what follows, the others go on.

The learner's thread produces weights (its collectives and its device belong to it); HTTP calls and broadcasts run in a
second thread, so that a bucket travels while the next one is packed. Every act has a time limit. Called by
`publisher.py`; the transports act through it. What a person must mend (UserError) is raised, not counted as a failure.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from megathunder.errors import UserError
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.protocol import ServerInfo
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)
Act = Callable[[ServerAddress], Awaitable[None]]


class PublishSession:
    """`with PublishSession(...) as session:`; `failed`: why, by server name; `info`: what each server said it is."""

    def __init__(self, servers: Iterable[ServerAddress], *, api_key: str, timeout_s: float) -> None:
        self.servers = tuple(servers)
        self.failed: dict[str, str] = {}
        self.info: dict[ServerAddress, ServerInfo] = {}
        self.timeout_s = timeout_s
        self.control = ServerControl(api_key=api_key, timeout_s=timeout_s)
        self._loop = asyncio.new_event_loop()
        self._workers = ThreadPoolExecutor(2 + 2 * len(self.servers), thread_name_prefix="publish")  # that may block
        self._loop.set_default_executor(self._workers)
        self._thread = threading.Thread(target=self._loop.run_forever, name="publish", daemon=True)

    def __enter__(self) -> PublishSession:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.control.__aenter__(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self.control.__aexit__(kind, error, trace), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._workers.shutdown(wait=False)  # a broadcast to a server that died ends at its own limit
        self._loop.close()

    def live(self, among: Iterable[ServerAddress] | None = None) -> tuple[ServerAddress, ...]:
        """The servers that have not failed."""
        return tuple(server for server in (self.servers if among is None else among) if server.name not in self.failed)

    def start(self, act: Act, among: Iterable[ServerAddress]) -> Future[None]:
        """Begin `act` for every live server of `among`; `.result()` waits for all of them and raises only UserError."""
        return asyncio.run_coroutine_threadsafe(self._each(act, tuple(among)), self._loop)

    def each(self, act: Act, among: Iterable[ServerAddress]) -> None:
        """`act` for every live server of `among`, all at once, to the end."""
        self.start(act, among).result()

    async def open_update(self, server: ServerAddress) -> None:
        """Ask what the server is, and make it ready for new weights."""
        self.info[server] = await self.control.open_update(server)

    async def close_update(self, server: ServerAddress) -> None:
        """End what `open_update` opened."""
        await self.control.close_update(server, self.info[server])

    async def _each(self, act: Act, among: tuple[ServerAddress, ...]) -> None:
        live = [server for server in among if server.name not in self.failed]
        limited = [asyncio.wait_for(act(server), self.timeout_s) for server in live]
        for server, result in zip(live, await asyncio.gather(*limited, return_exceptions=True), strict=True):
            if isinstance(result, UserError):
                raise result
            if isinstance(result, Exception):
                log.warning("publication to %s failed: %s", server.name, result or type(result).__name__)
                self.failed[server.name] = f"{type(result).__name__}: {result}"
