"""Two placements in front of one pool, of which one takes the requests: a comparison switches between updates.

A request ends where it was placed, and a trajectory is forgotten by both, so that a switch may come at any time.
Called by `engine.py`, switched by the coordinator.
"""

from __future__ import annotations

from megathunder.rollout.routing.request_router import Place, Placer
from megathunder.types import TrajectoryId


class Switched:
    """A `Placer` that is `own`, or `plain` while switched to it."""

    def __init__(self, own: Placer, plain: Placer) -> None:
        self._own, self._plain = own, plain
        self._now = own
        self._placed: dict[Place, Placer] = {}

    def switch(self, *, plain: bool) -> None:
        """Requests from now on."""
        self._now = self._plain if plain else self._own

    async def place(self, trajectory: TrajectoryId, tokens: int, version: int) -> Place:
        placer = self._now
        place = await placer.place(trajectory, tokens, version)
        self._placed[place] = placer
        return place

    def done(self, place: Place) -> None:
        self._placed.pop(place).done(place)

    def forget(self, trajectory: TrajectoryId) -> None:
        for placer in (self._own, self._plain):
            placer.forget(trajectory)

    async def close(self) -> None:
        for placer in (self._own, self._plain):
            await placer.close()
