"""Which request goes to which server, and when: the deciding code in plain Python, the waiting in `router.py`.

    Request -> RoutingState.arrive -> waiting -> RoutingState.grants -> in flight -> RoutingState.ended
    ... -> RoutingState.release

The same code runs in front of live servers and on the simulator's virtual clock.
"""

from __future__ import annotations

from megathunder.rollout.routing.build_router import build_policy, build_router
from megathunder.rollout.routing.request import Request
from megathunder.rollout.routing.request_router import Assignment, PolicyRouter, RequestRouter
from megathunder.rollout.routing.routing_state import RoutingState

__all__ = ["Assignment", "PolicyRouter", "Request", "RequestRouter", "RoutingState", "build_policy", "build_router"]
