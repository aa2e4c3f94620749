"""Where a waiting request goes. A policy orders what waits and names a server, or None: not yet.

    round_robin    every request to the next server                                         (baseline)
    least_loaded   every request to the server with the fewest in flight                    (baseline)
    session        a trajectory stays where it began; new ones go where the fewest are      (baseline)
    cache_aware    the server of the trajectory's earlier turns first, and:
        order      groups with the most finished trajectories, then the longest context, then arrival
        limit      at most `in_flight` requests run on a server; what comes after waits here, where it can be ordered
        admission  a trajectory starts where the least is held, if what lives there and itself fit `cache_tokens` after
                   GROWTH of what they still grow (trajectories end at `mean_tokens`, learnt); a group's prompt counts
                   once
        spill      a request leaves its full server for one with room that `spill_gap` fewer requests want, if
                   the context to compute again is at most `spill_tokens`; the trajectory stays there from then on

Nearest to closure first keeps the fewest groups (and gradient accumulators) open; longest first ends stragglers early
and keeps in the caches what is dearest to compute again. A policy reads the state (`RoutingView`) and never changes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megathunder.rollout.routing.request import ActiveTrajectory, Request
from megathunder.rollout.routing.server_load import Load, RoutingView

Order = tuple[int, ...]
GROWTH = 0.6  # trajectories that live together are of all ages: at once they fill about this share of their growth


class RoutingPolicy(Protocol):
    """A rule for one pool of servers."""

    def order(self, request: Request, state: RoutingView) -> Order:
        """Smallest first."""

    def choose(self, request: Request, state: RoutingView, servers: tuple[str, ...]) -> str | None:
        """One of `servers` (those with room, not empty), or None to let the request wait."""

    def has_room(self, load: Load) -> bool:
        """Whether one more request may run on a server."""

    def kind(self, request: Request, state: RoutingView) -> Hashable:
        """Requests of one kind get the same answer while nothing else is granted; None: it has none."""

    def learn(self, ended: ActiveTrajectory) -> None:
        """A trajectory is over."""


class Arrival:
    """Requests go in the order they came, at once."""

    def order(self, request: Request, state: RoutingView) -> Order:
        return (request.serial,)

    def has_room(self, load: Load) -> bool:
        return True

    def kind(self, request: Request, state: RoutingView) -> Hashable:
        return None

    def learn(self, ended: ActiveTrajectory) -> None:
        """Nothing to learn."""


class RoundRobin(Arrival):
    """Each request to the next server."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, state: RoutingView, servers: tuple[str, ...]) -> str | None:
        self._next += 1
        return servers[(self._next - 1) % len(servers)]


class LeastLoaded(Arrival):
    """Each request to the server with the fewest in flight."""

    def choose(self, request: Request, state: RoutingView, servers: tuple[str, ...]) -> str | None:
        return min(servers, key=lambda name: (state.loads[name].in_flight, name))


class SessionAffinity(Arrival):
    """A trajectory stays where it began; new ones go where the fewest are."""

    def choose(self, request: Request, state: RoutingView, servers: tuple[str, ...]) -> str | None:
        known = state.active.get(request.trajectory)
        if known is not None and known.affinity:
            return known.affinity
        return min(servers, key=lambda name: (len(state.loads[name].assigned), name))


@dataclass(slots=True, kw_only=True)
class CacheAware:
    """Affinity first, bounded in flight, admission by what the caches hold. `cache_tokens` is one server's cache."""

    cache_tokens: int
    in_flight: int
    spill_gap: int
    spill_tokens: int
    mean_tokens: float = 0.0  # at which trajectories end, so far
    _ended: int = field(default=0)

    def order(self, request: Request, state: RoutingView) -> Order:
        return (-state.finished[request.group], -request.tokens, request.serial)

    def choose(self, request: Request, state: RoutingView, servers: tuple[str, ...]) -> str | None:
        known = state.active.get(request.trajectory)
        if known is None or not known.affinity:
            return self._admit(request, state, servers)
        if self.has_room(state.loads[known.affinity]):
            return known.affinity
        return self._spill(request, known, state, servers)

    def has_room(self, load: Load) -> bool:
        return load.in_flight < self.in_flight

    def kind(self, request: Request, state: RoutingView) -> Hashable:
        known = state.active.get(request.trajectory)
        return None if known is not None and known.affinity else (request.group, request.tokens)

    def learn(self, ended: ActiveTrajectory) -> None:
        self._ended += 1
        self.mean_tokens += (ended.tokens - self.mean_tokens) / min(self._ended, 256)  # the last few hundred count

    def expected_tokens(self, tokens: int) -> int:
        """What a trajectory of `tokens` so far fills of a cache, with those it lives beside."""
        return tokens + max(0, round(GROWTH * (self.mean_tokens - tokens)))

    def held_tokens(self, state: RoutingView, server: str, more: Request, *, grown: bool) -> int:
        """Cache that `more` and the trajectories assigned to `server` fill, now or `grown`; a group's prompt once."""
        held = state.loads[server].held
        return held.grown_with(more, self.mean_tokens, self.expected_tokens) if grown else held.now_with(more)

    def _admit(self, request: Request, state: RoutingView, servers: Sequence[str]) -> str | None:
        """The server that would hold the least with it, of those where it fits; an empty one takes anything."""
        fits = [
            name
            for name in servers
            if not state.loads[name].assigned or self.held_tokens(state, name, request, grown=True) <= self.cache_tokens
        ]
        return min(fits, key=lambda n: (self.held_tokens(state, n, request, grown=False), n), default=None)

    def _spill(
        self, request: Request, known: ActiveTrajectory, state: RoutingView, servers: Sequence[str]
    ) -> str | None:
        if request.tokens > self.spill_tokens:
            return None
        demand = state.loads[known.affinity].demand
        less = [n for n in servers if demand - state.loads[n].demand >= self.spill_gap]
        return self._admit(request, state, less)
