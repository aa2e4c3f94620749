"""The router that a configuration asks for."""

from __future__ import annotations

from megathunder.config.rollout import RolloutConfig
from megathunder.config.routing import RoutingConfig
from megathunder.rollout.routing.request_router import PolicyRouter, Pool, RequestRouter
from megathunder.rollout.routing.routing_policies import (
    CacheAware,
    LeastLoaded,
    RoundRobin,
    RoutingPolicy,
    SessionAffinity,
)
from megathunder.rollout.routing.routing_state import RoutingState
from megathunder.rollout.routing.sglang_router import SglangRouter


def build_router(routing: RoutingConfig, rollout: RolloutConfig, pool: Pool) -> RequestRouter:
    """In front of `pool`, under `routing.policy`."""
    if routing.policy == "sglang_router":
        return SglangRouter(pool, api_key=rollout.api_key)
    return PolicyRouter(RoutingState(build_policy(routing, rollout)), pool)


def build_policy(routing: RoutingConfig, rollout: RolloutConfig) -> RoutingPolicy:
    """The policy that `routing` names."""
    match routing.policy:
        case "session":
            return SessionAffinity()
        case "least_loaded":
            return LeastLoaded()
        case "cache_aware":
            return CacheAware(
                cache_tokens=int(routing.cache_share * rollout.max_total_tokens),
                in_flight=routing.in_flight or rollout.max_running_requests,
                spill_gap=routing.spill_gap,
                spill_tokens=routing.spill_tokens,
            )
        case "round_robin":
            return RoundRobin()
        case other:
            raise ValueError(f"{other} is no rule of ours")
