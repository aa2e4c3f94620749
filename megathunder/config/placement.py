"""Which rollout server takes a request, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import NonNegativeInt, PositiveInt

PlacementPolicy = Literal["cache_aware", "session", "least_loaded", "round_robin", "sglang_router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """[placement] requests on the rollout servers."""

    policy: PlacementPolicy = "cache_aware"
    """`cache_aware` (a home for each trajectory, what the caches hold, groups nearest to closure first), `session` (a
    home, nothing else), `least_loaded`, `round_robin`, or `sglang_router` (SGLang's own router, a process)."""
    in_flight: NonNegativeInt = 0
    """cache_aware: requests that run on one server at once, the rest wait in order; 0: rollout.max_running_requests."""
    cache_share: Annotated[float, Meta(gt=0, le=1.0)] = 0.9
    """cache_aware: share of a server's cache (rollout.max_total_tokens) that the trajectories living there may fill."""
    spill_gap: PositiveInt = 8
    """cache_aware: a request leaves its full home when that is wanted by this many requests more than another."""
    spill_tokens: NonNegativeInt = 1024
    """cache_aware: longest context, in tokens, that leaves its home (it is computed again elsewhere)."""
