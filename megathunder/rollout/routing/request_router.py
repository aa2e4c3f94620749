"""Requests wait here until the policy sends them to a server.

    assignment = await router.assign(trajectory, tokens, version) ... router.done(assignment)
    router.release(trajectory)

Called by `engine.py`, in one event loop. Every arrival, end and change of the pool asks the routing state for grants:
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
from megathunder.rollout.routing.routing_state import RoutingState
from megathunder.types import ServerAddress, TrajectoryId


class Pool(Protocol):
    """What routing needs of `supervisor.ServerPool`."""

    listeners: list[Callable[[], None]]

    @property
    def ready(self) -> tuple[ServerAddress, ...]: ...

    @property
    def servers(self) -> tuple[ServerAddress, ...]: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Assignment:
    """The server that a request runs on. `tokens`: its context and what was sampled, once that is known."""

    request: Request
    server: ServerAddress
    tokens: int = 0


class RequestRouter(Protocol):
    """Routing of one pool's requests."""

    async def assign(self, trajectory: TrajectoryId, tokens: int, version: int) -> Assignment:
        """Wait for a server; `tokens` is the length of the context the request brings."""

    def done(self, assignment: Assignment) -> None:
        """The request ended, well or not."""

    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory ended. Idempotent."""

    async def close(self) -> None:
        """No request is under way any more. Idempotent."""


class PolicyRouter:
    """Decides here, by a routing policy (`routing_policies.py`)."""

    def __init__(self, state: RoutingState, pool: Pool) -> None:
        self.state, self._pool = state, pool
        self._serial = itertools.count()
        self._waiters: dict[int, asyncio.Future[ServerAddress]] = {}
        pool.listeners.append(self._pump)

    async def assign(self, trajectory: TrajectoryId, tokens: int, version: int) -> Assignment:
        request = Request(trajectory=trajectory, tokens=tokens, version=version, serial=next(self._serial))
        self._waiters[request.serial] = waiter = asyncio.get_running_loop().create_future()
        self.state.arrive(request)
        self._pump()
        try:
            return Assignment(request=request, server=await waiter)
        except (asyncio.CancelledError, InfrastructureFailure):
            self.state.withdraw(request)
            self._pump()
            raise
        finally:
            self._waiters.pop(request.serial)

    def done(self, assignment: Assignment) -> None:
        self.state.ended(assignment.request, assignment.server.name, tokens=assignment.tokens)
        self._pump()

    def release(self, trajectory: TrajectoryId) -> None:
        self.state.release(trajectory)
        self._pump()

    async def close(self) -> None:
        if self._pump in self._pool.listeners:
            self._pool.listeners.remove(self._pump)

    def _pump(self) -> None:
        """Let go what may go."""
        servers = {server.name: server for server in self._pool.ready}
        for request, name in self.state.grants(tuple(servers)):
            waiter = self._waiters[request.serial]
            if not waiter.done():  # else it was cancelled, and withdraws when its task wakes
                waiter.set_result(servers[name])
        if not self._pool.servers:
            for waiter in self._waiters.values():
                if not waiter.done():
                    waiter.set_exception(InfrastructureFailure("every server is lost"))
