"""Sandboxes of other machines: a pool whose leases are kept by servers (`serving.py`, tools/serve_sandboxes.py).

    lease -> the server with the fewest of ours that answers     exec, upload, download, close -> that server

Whatever isolates there was measured there before the server answered; here nothing is run. A server that is not
reached is a fault of the machinery, and the next lease goes elsewhere; its leases end by their lifetimes. Called by
rollout/ and evaluation/. Refuses to start while a server is not reached or does not take the key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import aiohttp
import msgspec

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.sandbox import remote_protocol
from megathunder.sandbox.interface import ExecResult
from megathunder.tasks import TaskFile

Answer = TypeVar("Answer")
CALL_S = 60.0  # beyond what a call itself may take
HELLO_S = 4.0


class RemoteSandbox:
    """A lease on a server."""

    def __init__(self, pool: RemotePool, url: str, name: str) -> None:
        self._pool, self._url, self._name, self._open = pool, url, name, True

    async def start(self, files: Iterable[TaskFile] = ()) -> None:
        await self.upload(files)

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        asked = remote_protocol.Exec(lease=self._name, command=command.encode(errors="replace"), deadline_s=deadline_s)
        return await self._ask(asked, ExecResult)

    async def upload(self, files: Iterable[TaskFile]) -> None:
        await self._ask(
            remote_protocol.Upload(lease=self._name, files=remote_protocol.packed(files)), remote_protocol.Nothing
        )

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        asked = remote_protocol.Download(lease=self._name, path=path, max_bytes=max_bytes)
        return (await self._ask(asked, remote_protocol.Content)).data

    async def close(self) -> None:
        if self._open:
            self._open = False
            await self._pool.ended(self._url, self._name)

    async def _ask(
        self, asked: remote_protocol.Exec | remote_protocol.Upload | remote_protocol.Download, kind: type[Answer]
    ) -> Answer:
        if not self._open:
            raise InfrastructureFailure(f"sandbox {self._name} was closed")
        return await self._pool.ask(self._url, asked, kind)


class RemotePool:
    """The sandboxes that this process holds on `sandbox.urls`."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config, self._name = config, secrets.token_hex(6)
        self._session: aiohttp.ClientSession | None = None
        self._held: Counter[str] = Counter({url: 0 for url in config.urls})
        self._leaks: list[str] = []

    async def start(self) -> None:
        """Every server answers, and takes the key."""
        headers = {"Authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        for url in self._config.urls:
            try:
                async with asyncio.timeout(HELLO_S):
                    await self.ask(url, remote_protocol.Hello(), remote_protocol.Nothing)
            except (InfrastructureFailure, TimeoutError) as error:
                await self._session.close()
                raise IsolationError(
                    f"the sandbox server {url} was not reached: {error or 'no answer'}",
                    expected="a server that answers and takes sandbox.api_key; commands never run here instead",
                    remedy="start tools/serve_sandboxes.py there, or correct sandbox.urls and sandbox.api_key",
                ) from error

    async def lease(self, files: Iterable[TaskFile] = (), image: str = "") -> RemoteSandbox:
        """A clean sandbox on the server that has the fewest of ours, or on another one if that fails."""
        asked = remote_protocol.Lease(client=self._name, files=remote_protocol.packed(files), image=image)
        failure = InfrastructureFailure("sandbox.urls is empty")
        for url in sorted(self._held, key=lambda known: self._held[known]):
            self._held[url] += 1
            try:
                leased = await self.ask(url, asked, remote_protocol.Leased, wait=True)
            except BaseException as error:
                self._held[url] -= 1
                if not isinstance(error, InfrastructureFailure):
                    raise
                failure = error
            else:
                return RemoteSandbox(self, url, leased.lease)
        raise failure

    async def ended(self, url: str, name: str) -> None:
        """A lease is given back; one that has expired is fine."""
        self._held[url] -= 1
        await self.ask(url, remote_protocol.Close(lease=name), remote_protocol.Nothing)

    async def close(self) -> None:
        """Ends what this process still holds on every server, and asks what is left there. Idempotent."""
        if self._session is None or self._session.closed:
            return
        for url in self._config.urls:
            try:
                left = await self.ask(url, remote_protocol.End(client=self._name), remote_protocol.Left)
                self._leaks += [f"{url}: {leak}" for leak in left.leaks]
            except InfrastructureFailure as failure:
                self._leaks.append(f"{url} does not say: {failure}")
        await self._session.close()

    def leaks(self) -> list[str]:
        """What the servers said when this pool was closed."""
        return list(self._leaks)

    async def ask(self, url: str, asked: remote_protocol.Request, kind: type[Answer], *, wait: bool = False) -> Answer:
        """One call. `wait`: it may take as long as it takes for a place to be free. Raises InfrastructureFailure."""
        limit_s = None if wait else CALL_S + getattr(asked, "deadline_s", 0.0)
        try:
            async with self._session.post(
                f"{url.rstrip('/')}/sandbox",
                data=msgspec.msgpack.encode(asked),
                timeout=aiohttp.ClientTimeout(total=limit_s),
            ) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise InfrastructureFailure(f"{url} was not reached: {type(error).__name__} {error}") from error
        if response.status != 200:
            raise InfrastructureFailure(f"{url}: {response.status} {data[:300].decode(errors='replace')}")
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except msgspec.DecodeError as error:
            raise InfrastructureFailure(f"{url} answered {data[:80]!r}: {error}") from error
