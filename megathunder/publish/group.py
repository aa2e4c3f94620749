"""A process group of learner rank 0 and the ranks of one rollout server.

One group a server, so that a server that dies in a broadcast takes only its own group along. torch.distributed has one
default group per process (the learner's); a second world with other members is made from its own store, as inference
engines do on their side.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.control import ServerControl
from megathunder.types import ServerAddress

Answer = TypeVar("Answer")


def open_store(host: str, port: int, timeout_s: float, *, ranks: int = 1) -> dist.TCPStore:
    """The rendezvous store of one pair, served by the learner. `port` 0 picks a free one (`store.port`)."""
    return dist.TCPStore(
        host, port, world_size=1 + ranks, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def open_pair(store: dist.TCPStore, *, name: str, backend: str, timeout_s: float, ranks: int = 1) -> dist.ProcessGroup:
    """The group {0: learner, 1 .. ranks: server}; returns when the server has joined, raises after `timeout_s`."""
    group, _ = _new_process_group_helper(
        1 + ranks,
        0,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {rank: rank for rank in range(1 + ranks)}
    return group


RUN = os.urandom(6).hex()  # a server may outlive the learner that gave it a group
_serial = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A group the server has joined under `name`, and the store it met in, which must live as long."""

    name: str
    group: dist.ProcessGroup
    store: dist.TCPStore


class Pairs:
    """One pair per live server, made when it is first seen, or seen restarted. `host`: where servers find us."""

    def __init__(self, *, backend: str, timeout_s: float, host: str) -> None:
        self._backend, self._timeout_s, self._host = backend, timeout_s, host
        self._pairs: dict[ServerAddress, Pair] = {}

    def __getitem__(self, server: ServerAddress) -> Pair:
        return self._pairs[server]

    async def join(self, control: ServerControl, server: ServerAddress, ranks: int) -> None:
        """Have the server join a pair with us; at once where it has."""
        if server in self._pairs:
            return
        self.forget(server)
        name = f"publish-{server.name}-{RUN}-{next(_serial)}"
        host = self._host if urlsplit(server.url).hostname not in ("127.0.0.1", "localhost") else "127.0.0.1"
        store = open_store(host, 0, self._timeout_s, ranks=ranks)
        told = asyncio.create_task(
            control.init_update_group(
                server, host=host, port=store.port, group_name=name, backend=self._backend, ranks=ranks
            )
        )
        opened = asyncio.to_thread(
            open_pair, store, name=name, backend=self._backend, timeout_s=self._timeout_s, ranks=ranks
        )
        group, _ = await asyncio.gather(opened, told)
        self._pairs[server] = Pair(name=name, group=group, store=store)

    async def exchange(self, server: ServerAddress, told: Awaitable[Answer], data: torch.Tensor) -> Answer:
        """What the server answers to the call `told`, on which it receives `data`, broadcast meanwhile. Where either
        fails the pair is given up, and a broadcast that nobody receives is left to its limit in its thread."""
        telling, sending = asyncio.ensure_future(told), asyncio.ensure_future(self.broadcast(server, data))
        try:
            answer, _ = await asyncio.gather(telling, sending)
        except BaseException:
            telling.cancel()
            sending.cancel()
            self.forget(server)
            raise
        return answer

    async def broadcast(self, server: ServerAddress, data: torch.Tensor) -> None:
        """Send `data` [bytes] to every rank of the server. Raises InfrastructureFailure after the limit."""
        await asyncio.to_thread(self._broadcast, self._pairs[server].group, data)

    def _broadcast(self, group: dist.ProcessGroup, data: torch.Tensor) -> None:
        if data.is_cuda:
            torch.cuda.set_device(data.device)  # the device is a thread's own
        work = dist.broadcast(data, 0, group=group, async_op=True)
        if not work.wait(timedelta(seconds=self._timeout_s)):
            raise InfrastructureFailure(f"the broadcast did not finish within {self._timeout_s:.0f} s")

    def forget(self, server: ServerAddress) -> None:
        """Let go of every pair with a server of this name: it failed, or it was restarted."""
        for known in [s for s in self._pairs if s.name == server.name]:
            group = self._pairs.pop(known).group
            group.abort() if hasattr(group, "abort") else None
