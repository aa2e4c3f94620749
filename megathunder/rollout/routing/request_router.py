"""Requests wait here until the board lets them go.

    place = await router.place(trajectory, tokens, version) ... router.done(place)      router.forget(trajectory)

Called by `engine.py`, in one event loop. Every arrival, end and change of the pool asks the board for grants, so
nothing polls. A request that is cancelled while it waits gives its turn back; when every server is lost, those that
wait fail.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.routing.request import Request
from megathunder.rollout.routing.routing_state import Board
from megathunder.types import ServerAddress, TrajectoryId


class Pool(Protocol):
    """What placement needs of `supervisor.ServerPool`."""

    listeners: list[Callable[[], None]]

    @property
    def ready(self) -> tuple[ServerAddress, ...]: ...

    @property
    def servers(self) -> tuple[ServerAddress, ...]: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """A request's permission to run on `server`. `tokens`: its context and what was sampled, once that is known."""

    request: Request
    server: ServerAddress
    tokens: int = 0


class Placer(Protocol):
    """Placement of one pool's requests."""

    async def place(self, trajectory: TrajectoryId, tokens: int, version: int) -> Place:
        """Wait for a server; `tokens` is the length of the context the request brings."""

    def done(self, place: Place) -> None:
        """The request ended, well or not."""

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory ended. Idempotent."""

    async def close(self) -> None:
        """No request is under way any more. Idempotent."""


class Router:
    """A board in front of a pool."""

    def __init__(self, board: Board, pool: Pool) -> None:
        self.board, self._pool = board, pool
        self._serial = itertools.count()
        self._waiters: dict[int, asyncio.Future[ServerAddress]] = {}
        pool.listeners.append(self._pump)

    async def place(self, trajectory: TrajectoryId, tokens: int, version: int) -> Place:
        request = Request(trajectory=trajectory, tokens=tokens, version=version, serial=next(self._serial))
        self._waiters[request.serial] = waiter = asyncio.get_running_loop().create_future()
        self.board.arrive(request)
        self._pump()
        try:
            return Place(request=request, server=await waiter)
        except (asyncio.CancelledError, InfrastructureFailure):
            self.board.withdraw(request)
            self._pump()
            raise
        finally:
            self._waiters.pop(request.serial)

    def done(self, place: Place) -> None:
        self.board.ended(place.request, place.server.name, tokens=place.tokens)
        self._pump()

    def forget(self, trajectory: TrajectoryId) -> None:
        self.board.forget(trajectory)
        self._pump()

    async def close(self) -> None:
        if self._pump in self._pool.listeners:
            self._pool.listeners.remove(self._pump)

    def _pump(self) -> None:
        """Let go what may go."""
        servers = {server.name: server for server in self._pool.ready}
        for request, name in self.board.grants(tuple(servers)):
            waiter = self._waiters[request.serial]
            if not waiter.done():  # else it was cancelled, and withdraws when its task wakes
                waiter.set_result(servers[name])
        if not self._pool.servers:
            for waiter in self._waiters.values():
                if not waiter.done():
                    waiter.set_exception(InfrastructureFailure("every server is lost"))
