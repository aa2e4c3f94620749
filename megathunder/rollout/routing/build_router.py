"""The placement that a configuration asks for."""

from __future__ import annotations

from megathunder.config.placement import PlacementConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.routing.request_router import Placer, Pool, Router
from megathunder.rollout.routing.routing_policies import CacheAware, LeastLoaded, Policy, RoundRobin, Session
from megathunder.rollout.routing.routing_state import Board
from megathunder.rollout.routing.sglang_router import ExternalRouter


def build_router(placement: PlacementConfig, rollout: RolloutConfig, pool: Pool) -> Placer:
    """In front of `pool`, under `placement.policy`."""
    if placement.policy == "sglang_router":
        return ExternalRouter(pool, api_key=rollout.api_key)
    return Router(Board(build_policy(placement, rollout)), pool)


def build_policy(placement: PlacementConfig, rollout: RolloutConfig) -> Policy:
    """The rule that `placement` names."""
    match placement.policy:
        case "session":
            return Session()
        case "least_loaded":
            return LeastLoaded()
        case "cache_aware":
            return CacheAware(
                cache_tokens=int(placement.cache_share * rollout.max_total_tokens),
                in_flight=placement.in_flight or rollout.max_running_requests,
                spill_gap=placement.spill_gap,
                spill_tokens=placement.spill_tokens,
            )
        case "round_robin":
            return RoundRobin()
        case other:
            raise ValueError(f"{other} is no rule of ours")
