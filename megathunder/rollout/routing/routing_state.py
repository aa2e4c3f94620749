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

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence

from megathunder.rollout.routing.request import ActiveTrajectory, GroupId, Request
from megathunder.rollout.routing.routing_policies import Order, RoutingPolicy
from megathunder.rollout.routing.server_load import Load
from megathunder.types import TrajectoryId

REMEMBERED_GROUPS = 4096  # the oldest beyond these are over


class RoutingState:
    """The routing state of one pool, under one policy. An event costs the same however many are in flight."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.active: dict[TrajectoryId, ActiveTrajectory] = {}
        self.loads: dict[str, Load] = {}
        self.finished: Counter[GroupId] = Counter()  # trajectories of a group that are over
        self.moves = 0  # times a started trajectory changed its server
        self._waiting: dict[int, Request] = {}  # by serial
        self._ordered: list[Order] = []  # of all that wait, sorted; an order ends with the serial
        self._order: dict[int, Order] = {}
        self._waiting_groups: dict[GroupId, set[int]] = {}
        self._waiting_of: Counter[TrajectoryId] = Counter()
        self._servers: tuple[str, ...] = ()
        self._granted: dict[int, str] = {}  # serial -> server

    def arrive(self, request: Request) -> None:
        """Let it wait for `grants`."""
        self._drop_stale_affinity(request)
        self._waiting[request.serial] = request
        self._waiting_groups.setdefault(request.group, set()).add(request.serial)
        self._enqueue(request)
        self._count_waiting(request.trajectory, 1)

    def withdraw(self, request: Request) -> None:
        """It is no longer wanted: neither waiting nor, if it was granted, in flight."""
        if request.serial in self._waiting:
            self._stop_waiting(request)
        server = self._granted.get(request.serial)
        if server is not None:
            self.ended(request, server)

    def grants(self, servers: Sequence[str]) -> list[tuple[Request, str]]:
        """Every request that may go now, to one of `servers`."""
        granted: list[tuple[Request, str]] = []
        if not servers:
            return granted
        self._keep_only(tuple(servers))
        room = self._with_room(servers)
        refused: set[Hashable] = set()
        for order in tuple(self._ordered) if room else ():
            request = self._waiting[order[-1]]
            kind = self.policy.kind(request, self)
            if kind is not None and kind in refused:
                continue
            server = self.policy.choose(request, self, room)
            if server is None:
                refused.add(kind)
                continue
            granted.append((request, self._grant(request, server)))
            refused.clear()
            if not self.policy.has_room(self.loads[server]) and not (room := self._with_room(servers)):
                break
        return granted

    def ended(self, request: Request, server: str, *, tokens: int = 0) -> None:
        """The request ran; its context and what was sampled are now `tokens` (0: it failed)."""
        if self._granted.pop(request.serial, None) is None:
            return
        self.loads[server].in_flight -= 1
        known = self.active.get(request.trajectory)
        if known is not None and tokens:
            known.tokens, known.turns = tokens, known.turns + 1
            if known.affinity:
                self.loads[known.affinity].held.put(request.trajectory, known)

    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory is over, well or not. Idempotent."""
        known = self.active.get(trajectory)
        if known is None:
            return
        self._leave(trajectory, known)
        del self.active[trajectory]
        group = (trajectory.update, trajectory.group)
        self.finished[group] += 1
        self._reorder(group)
        while len(self.finished) > REMEMBERED_GROUPS:
            oldest = next(iter(self.finished))
            del self.finished[oldest]
            self._reorder(oldest)
        self.policy.learn(known)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def trajectories_on(self, server: str) -> list[ActiveTrajectory]:
        """The trajectories assigned to it."""
        return [self.active[trajectory] for trajectory in self.loads[server].assigned]

    # ------------------------------------------------------------------------------------------ private

    def _grant(self, request: Request, server: str) -> str:
        self._stop_waiting(request)
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
        load.held.put(request.trajectory, known)
        load.waiting += self._waiting_of[request.trajectory]
        return server

    def _with_room(self, servers: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in servers if self.policy.has_room(self.loads[name]))

    def _keep_only(self, servers: tuple[str, ...]) -> None:
        """Trajectories have affinity to none but `servers` from here on."""
        if servers == self._servers:
            return
        self._servers = servers
        for name in servers:
            self.loads.setdefault(name, Load(name))
        for name, load in self.loads.items():
            if name not in servers:
                for trajectory in load.assigned:
                    self.active[trajectory].affinity = ""
                load.assigned.clear()
                load.held.clear()
                load.waiting = 0

    def _enqueue(self, request: Request) -> None:
        self._order[request.serial] = order = self.policy.order(request, self)
        bisect.insort(self._ordered, order)

    def _dequeue(self, request: Request) -> None:
        del self._ordered[bisect.bisect_left(self._ordered, self._order.pop(request.serial))]

    def _reorder(self, group: GroupId) -> None:
        """The order of a group's requests has changed."""
        for serial in self._waiting_groups.get(group, ()):
            self._dequeue(self._waiting[serial])
            self._enqueue(self._waiting[serial])

    def _stop_waiting(self, request: Request) -> None:
        self._dequeue(request)
        del self._waiting[request.serial]
        of_group = self._waiting_groups[request.group]
        of_group.discard(request.serial)
        if not of_group:
            del self._waiting_groups[request.group]
        self._count_waiting(request.trajectory, -1)

    def _count_waiting(self, trajectory: TrajectoryId, change: int) -> None:
        self._waiting_of[trajectory] += change
        if not self._waiting_of[trajectory]:
            del self._waiting_of[trajectory]
        known = self.active.get(trajectory)
        if known is not None and known.affinity:
            self.loads[known.affinity].waiting += change

    def _drop_stale_affinity(self, request: Request) -> None:
        """Where the weights changed in between, the server holds nothing of the trajectory any more."""
        known = self.active.get(request.trajectory)
        if known is not None and known.version != request.version:
            self._leave(request.trajectory, known)
            known.turns = 0

    def _leave(self, trajectory: TrajectoryId, known: ActiveTrajectory) -> None:
        if known.affinity:
            load = self.loads[known.affinity]
            load.assigned.discard(trajectory)
            load.held.remove(trajectory)
            load.waiting -= self._waiting_of[trajectory]
            known.affinity = ""
