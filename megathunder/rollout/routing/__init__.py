"""Which request goes to which server, and when: the deciding code in plain Python, the waiting in `router.py`.

    Request -> Board.arrive -> waiting -> Board.grants -> in flight -> Board.ended -> ... -> Board.forget

The same board and policies run in front of live servers and on the simulator's virtual clock.
"""

from __future__ import annotations

from megathunder.rollout.routing.build_router import build_policy, build_router
from megathunder.rollout.routing.request import Request
from megathunder.rollout.routing.request_router import Place, Placer, Router
from megathunder.rollout.routing.routing_state import Board

__all__ = ["Board", "Place", "Placer", "Request", "Router", "build_policy", "build_router"]
