"""What routing knows of a server, and what a policy reads of it all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from megathunder.rollout.routing.held_tokens import HeldTokens
from megathunder.rollout.routing.request import ActiveTrajectory, GroupId
from megathunder.types import TrajectoryId


@dataclass(slots=True)
class Load:
    """One server: how many requests run there, how many wait for it, which trajectories have affinity to it, and
    what these fill of its cache."""

    name: str
    in_flight: int = 0
    waiting: int = 0
    assigned: set[TrajectoryId] = field(default_factory=set)
    held: HeldTokens = field(default_factory=HeldTokens)

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
    def finished(self) -> Counter[GroupId]: ...
