"""Requests that wait, requests in flight and trajectories with a home; who may go where now.

    arrive(request)                         it waits
    grants(servers) -> [(request, server)]  those that may go now, in the policy's order; each is in flight from here on
    ended(request, server)                  it is no longer in flight, well or not
    forget(trajectory)                      the trajectory is over

`servers` are the names that take work at that moment: a trajectory whose home is not among them (dead, draining) has
none and is placed anew. A request is granted once. Pure bookkeeping over a policy (`policies.py`): no clock, no
sockets. What waits when nothing lives is granted under every policy, so that nothing can stall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megathunder.rollout.routing.request import Living, Load, Request
from megathunder.rollout.routing.routing_policies import Policy
from megathunder.types import TrajectoryId

REMEMBERED_GROUPS = 4096  # the oldest beyond these are over


class Board:
    """Placement of one pool's requests under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.living: dict[TrajectoryId, Living] = {}
        self.loads: dict[str, Load] = {}
        self.finished: Counter[tuple[int, int]] = Counter()  # trajectories of a group that are over
        self.moves = 0  # times a started trajectory changed its home
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
        self._hold_to(servers)
        for request in sorted(self._waiting, key=lambda r: self.policy.order(r, self)):
            self._void_stale_home(request)
            server = self.policy.choose(request, self, tuple(servers))
            if server is not None:
                granted.append((request, self._grant(request, server)))
        return granted

    def ended(self, request: Request, server: str, *, tokens: int = 0) -> None:
        """The request ran; its context and what was sampled are now `tokens` (0: it failed)."""
        if self._granted.pop(request.serial, None) is None:
            return
        self.loads[server].in_flight -= 1
        known = self.living.get(request.trajectory)
        if known is not None and tokens:
            known.tokens, known.turns = tokens, known.turns + 1

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory is over, well or not. Idempotent."""
        known = self.living.pop(trajectory, None)
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

    def homes(self, server: str) -> list[Living]:
        """The trajectories that live there."""
        return [self.living[trajectory] for trajectory in self.loads[server].homes]

    # ------------------------------------------------------------------------------------------ private

    def _grant(self, request: Request, server: str) -> str:
        self._waiting.remove(request)
        self._granted[request.serial] = server
        load = self.loads[server]
        load.in_flight += 1
        known = self.living.get(request.trajectory)
        if known is None:
            known = Living(request.tokens, request.tokens, "", request.version)
            self.living[request.trajectory] = known
        elif known.home and known.home != server:
            self.moves += known.started
        self._leave(request.trajectory, known)
        known.home, known.version, known.tokens = server, request.version, request.tokens
        load.homes.add(request.trajectory)
        self._count_waiting()
        return server

    def _hold_to(self, servers: Sequence[str]) -> None:
        """Homes are among `servers` from here on."""
        for name in servers:
            self.loads.setdefault(name, Load(name))
        for name, load in self.loads.items():
            if name not in servers:
                for trajectory in load.homes:
                    self.living[trajectory].home = ""
                load.homes.clear()
        self._count_waiting()

    def _count_waiting(self) -> None:
        for load in self.loads.values():
            load.waiting = 0
        for request in self._waiting:
            known = self.living.get(request.trajectory)
            if known is not None and known.home:
                self.loads[known.home].waiting += 1

    def _void_stale_home(self, request: Request) -> None:
        """Where the weights changed in between, the home holds nothing of the trajectory any more."""
        known = self.living.get(request.trajectory)
        if known is not None and known.version != request.version:
            self._leave(request.trajectory, known)
            known.turns = 0

    def _leave(self, trajectory: TrajectoryId, known: Living) -> None:
        if known.home:
            self.loads[known.home].homes.discard(trajectory)
            known.home = ""
