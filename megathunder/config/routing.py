"""Which rollout server takes a request, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import NonNegativeInt, PositiveInt

RoutingPolicyName = Literal["cache_aware", "session", "least_loaded", "round_robin", "sglang_router"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """[routing] which rollout server takes a request."""

    policy: RoutingPolicyName = "cache_aware"
    """`cache_aware` (affinity of trajectories to servers, what the caches hold, groups nearest to closure first),
    `session` (affinity alone), `least_loaded`, `round_robin`, or `sglang_router` (SGLang's own router, a process)."""
    in_flight: NonNegativeInt = 0
    """cache_aware: requests that run on one server at once, the rest wait in order; 0: rollout.max_running_requests."""
    cache_share: Annotated[float, Meta(gt=0, le=1.0)] = 0.9
    """cache_aware: share of a server's cache (rollout.max_total_tokens) that its trajectories may fill."""
    spill_gap: PositiveInt = 8
    """cache_aware: a request leaves its full server for one that this many fewer requests want."""
    spill_tokens: NonNegativeInt = 1024
    """cache_aware: longest context, in tokens, that leaves its server (it is computed again elsewhere)."""
