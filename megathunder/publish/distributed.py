"""Full weights over a process group per server: the server is told a bucket's layout over HTTP, and receives its bytes.

    for each bucket:   POST /update_weights_from_distributed (names, types, shapes)   to every server, at once
                       broadcast the bucket's bytes                                   in every server's group, at once
    the last bucket carries the policy version and flushes the prefix cache

A server that does not take part within the limit is reported as failed and its group forgotten; the others go on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megathunder.errors import InfrastructureFailure
from megathunder.publish.buckets import Bucket, buckets
from megathunder.publish.group import open_pair, open_store
from megathunder.rollout.control import ServerControl
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one publication did: bytes sent to each server, and the servers that did not acknowledge, with reasons."""

    payload_bytes: int
    failed: dict[str, str]


class DistributedTransport:
    """Holds one pair group per live server, made when the server is first seen (or seen restarted)."""

    def __init__(self, *, backend: str, bucket_bytes: int, timeout_s: float, api_key: str, host: str) -> None:
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_bytes, timeout_s
        self._api_key, self._host = api_key, host
        self._groups: dict[ServerAddress, tuple[str, dist.ProcessGroup, dist.TCPStore]] = {}
        self._serial = itertools.count()

    def send(
        self, version: int, servers: tuple[ServerAddress, ...], weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Sent:
        """Publish `weights` (engine names, full tensors) as `version`; returns when every server answered or failed."""
        return asyncio.run(self._send(version, servers, weights))

    async def _send(
        self, version: int, servers: tuple[ServerAddress, ...], weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Sent:
        failed: dict[str, str] = {}
        async with ServerControl(api_key=self._api_key, timeout_s=self._timeout_s) as control:
            await self._each(servers, failed, lambda server: self._join(control, server))
            payload_bytes, pending = 0, None
            for bucket in itertools.chain(buckets(weights, self._bucket_bytes), [None]):
                if pending is not None:
                    await self._send_bucket(control, pending, None if bucket else version, servers, failed)
                    payload_bytes += pending.data.nbytes
                pending = bucket
        return Sent(payload_bytes=payload_bytes, failed=failed)

    async def _send_bucket(
        self,
        control: ServerControl,
        bucket: Bucket,
        version: int | None,
        servers: tuple[ServerAddress, ...],
        failed: dict[str, str],
    ) -> None:
        async def one(server: ServerAddress) -> None:
            name, group, _ = self._groups[server]
            told = asyncio.create_task(
                control.update_from_distributed(
                    server,
                    names=bucket.names,
                    dtypes=bucket.dtypes,
                    shapes=bucket.shapes,
                    group_name=name,
                    version=version,
                )
            )
            await asyncio.gather(told, asyncio.to_thread(self._broadcast, group, bucket.data))

        await self._each(servers, failed, one)

    def _broadcast(self, group: dist.ProcessGroup, data: torch.Tensor) -> None:
        work = dist.broadcast(data, 0, group=group, async_op=True)
        if not work.wait(timedelta(seconds=self._timeout_s)):
            raise InfrastructureFailure(f"the broadcast did not finish within {self._timeout_s:.0f} s")

    async def _join(self, control: ServerControl, server: ServerAddress) -> None:
        if server in self._groups:
            return
        self._forget(server.name)
        name = f"publish-{server.name}-{server.incarnation}-{next(self._serial)}"
        host = self._host if urlsplit(server.url).hostname not in ("127.0.0.1", "localhost") else "127.0.0.1"
        store = open_store(host, 0, self._timeout_s)
        joined = asyncio.create_task(
            control.init_update_group(server, host=host, port=store.port, group_name=name, backend=self._backend)
        )
        group, _ = await asyncio.gather(
            asyncio.to_thread(open_pair, store, name=name, backend=self._backend, timeout_s=self._timeout_s), joined
        )
        self._groups[server] = (name, group, store)

    async def _each(self, servers: tuple[ServerAddress, ...], failed: dict[str, str], act: object) -> None:
        """Run `act` for every server that has not failed, at once; record those that fail now."""
        live = [server for server in servers if server.name not in failed]
        limited = [asyncio.wait_for(act(server), self._timeout_s) for server in live]
        for server, result in zip(live, await asyncio.gather(*limited, return_exceptions=True)):
            if isinstance(result, Exception):
                log.warning("publication to %s failed: %s", server.name, result)
                failed[server.name] = f"{type(result).__name__}: {result}"
                self._forget(server.name)

    def _forget(self, name: str) -> None:
        for server in [s for s in self._groups if s.name == name]:
            _, group, _ = self._groups.pop(server)
            group.abort() if hasattr(group, "abort") else None
