"""Routing as it is defined: every sum is made anew whenever it is asked for. The oracle of `rollout/routing/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megathunder.rollout.routing.request import ActiveTrajectory, Request
from megathunder.types import TrajectoryId

GROWTH = 0.6
REMEMBERED_GROUPS = 4096


@dataclass(slots=True)
class Load:
    """One server: how many requests run there, how many wait for it, which trajectories have affinity to it."""

    name: str
    in_flight: int = 0
    waiting: int = 0
    assigned: dict[TrajectoryId, None] = field(default_factory=dict)

    @property
    def demand(self) -> int:
        return self.in_flight + self.waiting


class NaiveRoutingState:
    """The routing state of one pool, under one policy."""

    def __init__(self, policy: NaiveCacheAware) -> None:
        self.policy = policy
        self.active: dict[TrajectoryId, ActiveTrajectory] = {}
        self.loads: dict[str, Load] = {}
        self.finished: Counter[tuple[int, int]] = Counter()  # trajectories of a group that are over
        self.moves = 0  # times a started trajectory changed its server
        self._waiting: list[Request] = []
        self._granted: dict[int, str] = {}  # serial -> server

    def arrive(self, request: Request) -> None:
        """Let it wait for `grants`."""
        self._drop_stale_affinity(request)
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
        load.assigned[request.trajectory] = None
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
            self._count_waiting()

    def _leave(self, trajectory: TrajectoryId, known: ActiveTrajectory) -> None:
        if known.affinity:
            self.loads[known.affinity].assigned.pop(trajectory, None)
            known.affinity = ""


@dataclass(slots=True, kw_only=True)
class NaiveCacheAware:
    """Affinity first, bounded in flight, admission by what the caches hold. `cache_tokens` is one server's cache."""

    cache_tokens: int
    in_flight: int
    spill_gap: int
    spill_tokens: int
    mean_tokens: float = 0.0  # at which trajectories end, so far
    _ended: int = field(default=0)

    def order(self, request: Request, state: NaiveRoutingState) -> tuple[int, ...]:
        return (-state.finished[request.group], -request.tokens, request.serial)

    def choose(self, request: Request, state: NaiveRoutingState, servers: tuple[str, ...]) -> str | None:
        open_servers = [name for name in servers if state.loads[name].in_flight < self.in_flight]
        known = state.active.get(request.trajectory)
        if known is None or not known.affinity:
            return self._admit(request, state, open_servers)
        if known.affinity in open_servers:
            return known.affinity
        return self._spill(request, known, state, open_servers)

    def learn(self, ended: ActiveTrajectory) -> None:
        self._ended += 1
        self.mean_tokens += (ended.tokens - self.mean_tokens) / min(self._ended, 256)  # the last few hundred count

    def expected_tokens(self, tokens: int) -> int:
        """What a trajectory of `tokens` so far fills of a cache, with those it lives beside."""
        return tokens + max(0, round(GROWTH * (self.mean_tokens - tokens)))

    def held_tokens(self, state: NaiveRoutingState, server: str, more: Request, *, grown: bool) -> int:
        """Cache that `more` and the trajectories assigned to `server` fill, now or `grown`; a group's prompt once."""
        prompts: dict[tuple[int, int], int] = {}
        beyond = 0
        here = [(t, state.active[t].prompt_tokens, state.active[t].tokens) for t in state.loads[server].assigned]
        for trajectory, prompt, tokens in (*here, (more.trajectory, more.tokens, more.tokens)):
            prompt = prompts.setdefault((trajectory.update, trajectory.group), prompt)
            beyond += max(0, (self.expected_tokens(tokens) if grown else tokens) - prompt)
        return sum(prompts.values()) + beyond

    def _admit(self, request: Request, state: NaiveRoutingState, servers: list[str]) -> str | None:
        """The server that would hold the least with it, of those where it fits; an empty one takes anything."""
        fits = [
            name
            for name in servers
            if not state.loads[name].assigned or self.held_tokens(state, name, request, grown=True) <= self.cache_tokens
        ]
        return min(fits, key=lambda n: (self.held_tokens(state, n, request, grown=False), n), default=None)

    def _spill(
        self, request: Request, known: ActiveTrajectory, state: NaiveRoutingState, servers: list[str]
    ) -> str | None:
        if request.tokens > self.spill_tokens:
            return None
        demand = state.loads[known.affinity].demand
        less = [n for n in servers if demand - state.loads[n].demand >= self.spill_gap]
        return self._admit(request, state, less)
