"""What routing knows of a request and of a server: lengths, counts and identities, no text and no time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megathunder.types import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn that wants a server. `tokens`: its context, [T]. A policy version has a cache of its own: what another
    version computed is flushed."""

    trajectory: TrajectoryId
    tokens: int
    version: int = 0
    serial: int = 0  # order of arrival

    @property
    def group(self) -> tuple[int, int]:
        return (self.trajectory.update, self.trajectory.group)


@dataclass(slots=True)
class ActiveTrajectory:
    """A trajectory between its first request and its end."""

    prompt_tokens: int
    tokens: int  # of its context so far
    affinity: str  # the server of its turns; "" for none
    version: int
    turns: int = 0

    @property
    def started(self) -> bool:
        """Whether a turn of it has been computed, so that its server's cache holds a prefix of it."""
        return self.turns > 0


@dataclass(slots=True)
class Load:
    """One server: how many requests run there, how many wait for it, which trajectories have affinity to it."""

    name: str
    in_flight: int = 0
    waiting: int = 0
    assigned: set[TrajectoryId] = field(default_factory=set)

    @property
    def demand(self) -> int:
        return self.in_flight + self.waiting


class RoutingView(Protocol):
    """What a policy reads of the routing state (`routing_state.py`)."""

    @property
    def active(self) -> Mapping[TrajectoryId, ActiveTrajectory]: ...

    @property
    def loads(self) -> Mapping[str, Load]: ...

    @property
    def finished(self) -> Counter[tuple[int, int]]: ...
