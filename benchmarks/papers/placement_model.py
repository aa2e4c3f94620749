"""Placement on a virtual clock: the state and policies of live runs in front of model servers.

    turn ready -> RoutingState.arrive -> .grants -> EngineModel ... -> RoutingState.ended -> gap -> next turn ready

Deterministic. What it answers is how many prompt tokens are computed again and how long turns wait, under a policy and
a cache size; its seconds are those of `EngineCosts`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.papers.agent_traces import AgentTrace
from benchmarks.papers.engine_model import EngineCosts, EngineModel, Job
from benchmarks.papers.radix_cache import RadixCache
from megathunder.rollout.routing import Request, RoutingState
from megathunder.rollout.routing.routing_policies import RoutingPolicy


@dataclass(slots=True)
class Outcome:
    """Of one simulated batch."""

    wall_s: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0  # of the prompts: not cached
    turn_s: list[float] = field(default_factory=list)  # from ready to answered
    moves: int = 0


def simulate_placement(
    traces: Sequence[AgentTrace],
    policy: RoutingPolicy,
    *,
    servers: int,
    cache_tokens: int,
    max_running: int,
    costs: EngineCosts = EngineCosts(),
    seed: int = 0,
) -> Outcome:
    """Run every trace to its end."""
    run = _Run(traces, policy, servers, cache_tokens, max_running, costs, seed)
    return run.to_the_end()


class _Run:
    def __init__(
        self,
        traces: Sequence[AgentTrace],
        policy: RoutingPolicy,
        servers: int,
        cache_tokens: int,
        max_running: int,
        costs: EngineCosts,
        seed: int,
    ) -> None:
        self._state, self._outcome = RoutingState(policy), Outcome()
        self._engines = {
            f"server-{i}": EngineModel(RadixCache(cache_tokens), costs, max_running) for i in range(servers)
        }
        self._stepping: set[str] = set()
        self._context = {trace.id: trace.prompt for trace in traces}
        self._traces = {trace.id: trace for trace in traces}
        self._turn = dict.fromkeys(self._traces, 0)
        self._jobs: dict[int, tuple[Request, str, float]] = {}
        self._requests: dict[int, tuple[Request, float]] = {}
        self._serial, self._order, self._chance = itertools.count(), itertools.count(), random.Random(seed)
        self._events: list[tuple[float, int, object]] = []
        for trace in traces:
            self._at(0.0, trace)

    def to_the_end(self) -> Outcome:
        now = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if isinstance(event, AgentTrace):
                self._turn_ready(event, now)
            else:
                self._step_ended(*event, now)
            self._go(now)
        assert not self._state.waiting and not self._state.active, "every request ran"
        self._outcome.wall_s, self._outcome.moves = now, self._state.moves
        return self._outcome

    def _at(self, time_s: float, event: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _turn_ready(self, trace: AgentTrace, now: float) -> None:
        self._context[trace.id] += trace.turns[self._turn[trace.id]].observation
        request = Request(trajectory=trace.id, tokens=len(self._context[trace.id]), serial=next(self._serial))
        self._requests[request.serial] = (request, now)
        self._state.arrive(request)

    def _go(self, now: float) -> None:
        """Grants to their servers; every idle server that has work begins a step."""
        for request, server in self._state.grants(tuple(self._engines)):
            turn = self._traces[request.trajectory].turns[self._turn[request.trajectory]]
            samples = tuple(self._chance.randrange(10, 2000) for _ in range(turn.action_tokens))
            job = Job(prompt=self._context[request.trajectory], samples=samples)
            self._jobs[id(job)] = (request, server, self._requests.pop(request.serial)[1])
            self._engines[server].waiting.append(job)
        for name, engine in self._engines.items():
            if name not in self._stepping and engine.busy:
                self._stepping.add(name)
                seconds, ended = engine.advance()
                self._at(now + seconds, (name, ended))

    def _step_ended(self, name: str, ended: list[Job], now: float) -> None:
        self._stepping.discard(name)
        for job in ended:
            request, server, ready_s = self._jobs.pop(id(job))
            trajectory, trace = request.trajectory, self._traces[request.trajectory]
            self._outcome.prompt_tokens += len(job.prompt)
            self._outcome.computed_tokens += job.computed_tokens
            self._outcome.turn_s.append(now - ready_s)
            self._context[trajectory] = job.prompt + job.samples
            self._turn[trajectory] += 1
            self._state.ended(request, server, tokens=len(self._context[trajectory]))
            if self._turn[trajectory] < len(trace.turns):
                self._at(now + trace.turns[self._turn[trajectory]].gap_s, trace)
            else:
                self._state.release(trajectory)
