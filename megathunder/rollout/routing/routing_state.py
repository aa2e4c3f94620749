"""Requests that wait, requests in flight and the server of each trajectory; who may go where now.

    arrive(request)                         it waits
    grants(servers) -> [(request, server)]  those that may go now, in the policy's order; each is in flight from here on
    ended(request, server)                  it is no longer in flight, well or not
    release(trajectory)                     the trajectory is over

`servers` are the names that take work at that moment: a trajectory whose server is not among them (dead, draining)
is assigned anew. A request is granted once. Pure bookkeeping over a policy (`routing_policies.py`): no clock, no
sockets. What waits when nothing runs is granted under every policy, so that nothing can stall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megathunder.rollout.routing.request import ActiveTrajectory, Load, Request
from megathunder.rollout.routing.routing_policies import RoutingPolicy
from megathunder.types import TrajectoryId

REMEMBERED_GROUPS = 4096  # the oldest beyond these are over


class RoutingState:
    """The routing state of one pool, under one policy."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.active: dict[TrajectoryId, ActiveTrajectory] = {}
        self.loads: dict[str, Load] = {}
        self.finished: Counter[tuple[int, int]] = Counter()  # trajectories of a group that are over
        self.moves = 0  # times a started trajectory changed its server
        self._waiting: list[Request] = []
        self._granted: dict[int, str] = {}  # serial -> server

    def arrive(self, request: Request) -> None:
        """Let it wait for `grants`."""
        self._waiting.append(request)

    def withdraw(self, request: Request) -> None:
        """It is no longer wanted: neither waiting nor, if it was granted, in flight."""
        self._waiting = [other for other in self._waiting if other.serial != request.serial]
        server = self._granted.get(request.serial)
        if server is not None:
            self.ended(request, server)

    def grants(self, servers: Sequence[str]) -> list[tuple[Request, str]]:
        """Every request that may go now, to one of `servers`."""
        granted: list[tuple[Request, str]] = []
        if not servers:
            return granted
        self._keep_only(servers)
        for request in sorted(self._waiting, key=lambda r: self.policy.order(r, self)):
            self._drop_stale_affinity(request)
            server = self.policy.choose(request, self, tuple(servers))
            if server is not None:
                granted.append((request, self._grant(request, server)))
        return granted

    def ended(self, request: Request, server: str, *, tokens: int = 0) -> None:
        """The request ran; its context and what was sampled are now `tokens` (0: it failed)."""
        if self._granted.pop(request.serial, None) is None:
            return
        self.loads[server].in_flight -= 1
        known = self.active.get(request.trajectory)
        if known is not None and tokens:
            known.tokens, known.turns = tokens, known.turns + 1

    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory is over, well or not. Idempotent."""
        known = self.active.pop(trajectory, None)
        if known is None:
            return
        self._leave(trajectory, known)
        self.finished[trajectory.update, trajectory.group] += 1
        while len(self.finished) > REMEMBERED_GROUPS:
            del self.finished[next(iter(self.finished))]
        self.policy.learn(known)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def trajectories_on(self, server: str) -> list[ActiveTrajectory]:
        """The trajectories assigned to it."""
        return [self.active[trajectory] for trajectory in self.loads[server].assigned]

    # ------------------------------------------------------------------------------------------ private

    def _grant(self, request: Request, server: str) -> str:
        self._waiting.remove(request)
        self._granted[request.serial] = server
        load = self.loads[server]
        load.in_flight += 1
        known = self.active.get(request.trajectory)
        if known is None:
            known = ActiveTrajectory(request.tokens, request.tokens, "", request.version)
            self.active[request.trajectory] = known
        elif known.affinity and known.affinity != server:
            self.moves += known.started
        self._leave(request.trajectory, known)
        known.affinity, known.version, known.tokens = server, request.version, request.tokens
        load.assigned.add(request.trajectory)
        self._count_waiting()
        return server

    def _keep_only(self, servers: Sequence[str]) -> None:
        """Trajectories have affinity to none but `servers` from here on."""
        for name in servers:
            self.loads.setdefault(name, Load(name))
        for name, load in self.loads.items():
            if name not in servers:
                for trajectory in load.assigned:
                    self.active[trajectory].affinity = ""
                load.assigned.clear()
        self._count_waiting()

    def _count_waiting(self) -> None:
        for load in self.loads.values():
            load.waiting = 0
        for request in self._waiting:
            known = self.active.get(request.trajectory)
            if known is not None and known.affinity:
                self.loads[known.affinity].waiting += 1

    def _drop_stale_affinity(self, request: Request) -> None:
        """Where the weights changed in between, the server holds nothing of the trajectory any more."""
        known = self.active.get(request.trajectory)
        if known is not None and known.version != request.version:
            self._leave(request.trajectory, known)
            known.turns = 0

    def _leave(self, trajectory: TrajectoryId, known: ActiveTrajectory) -> None:
        if known.affinity:
            self.loads[known.affinity].assigned.discard(trajectory)
            known.affinity = ""
