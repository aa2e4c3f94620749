"""Which server takes a request: the trajectory's home while that is ready, else the one with the least in flight.

    router.place(trajectory, tokens, ready) -> server    router.done(server, tokens)    router.forget(trajectory)

A trajectory that stays with one server finds its earlier turns in that server's prefix cache. Called by `engine.py`;
another policy is another class with these three methods.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from megathunder.types import ServerAddress, TrajectoryId


class Router(Protocol):
    """Placement of requests on servers. `tokens` is the length of the context the request brings."""

    def place(self, trajectory: TrajectoryId, tokens: int, ready: tuple[ServerAddress, ...]) -> ServerAddress:
        """Choose one of `ready` (not empty) and count the request as in flight there."""

    def done(self, server: ServerAddress, tokens: int) -> None:
        """The request ended, well or not."""

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory ended."""


class StickyRouter:
    """Home server first; new trajectories go where the fewest live."""

    def __init__(self) -> None:
        self._home: dict[TrajectoryId, str] = {}
        self._living: Counter[str] = Counter()

    def place(self, trajectory: TrajectoryId, tokens: int, ready: tuple[ServerAddress, ...]) -> ServerAddress:
        home = self._home.get(trajectory)
        for server in ready:
            if server.name == home:
                return server
        self.forget(trajectory)
        chosen = min(ready, key=lambda server: (self._living[server.name], server.name))
        self._home[trajectory] = chosen.name
        self._living[chosen.name] += 1
        return chosen

    def done(self, server: ServerAddress, tokens: int) -> None:
        """Living trajectories are what is balanced, so a request's end changes nothing."""

    def forget(self, trajectory: TrajectoryId) -> None:
        home = self._home.pop(trajectory, None)
        if home is not None:
            self._living[home] -= 1
