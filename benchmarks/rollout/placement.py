"""Placement on two servers with scarce caches: every policy on the same agents' traces, alternating.

    trace     groups of agents that share a prompt; 4 to 8 turns, observations of 80, 160 or 240 tokens between them,
              and an idle gap before each (exponential, .4 s): synthetic, the same for every policy
    policies  round_robin, least_loaded, session, cache_aware, and sglang_router where its package is installed

The policy served is made for this: random weights, 512 units, 6 layers (`--hidden`, `--layers`), where a prompt token
costs what it costs beside a decode step; `--model` serves another. Each round runs every policy once, in an order that
rotates; caches are flushed before each. One more round before the first is not counted: there, `cache_aware` learns how
long trajectories get, as in a run's first update. Reported, medians over rounds: wall and server CPU seconds, prompt
tokens computed again or anew, turn latency (waiting for a place included), and the computed tokens that the simulator
foretells. Targets, against round_robin: 1.4 in wall or CPU at two observation lengths; the fewest computed tokens;
never more than 10 % slower than sglang_router.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.papers.agent_traces import AgentTrace, synthetic
from benchmarks.papers.placement_model import simulate_placement
from benchmarks.rollout import option_checks
from benchmarks.rollout.tables import show_placement
from benchmarks.rollout.wide import LONGEST, wide_policy
from megathunder.config.model_shape import read_model_shape
from megathunder.config.rollout import RolloutConfig
from megathunder.config.routing import RoutingConfig
from megathunder.errors import UserError
from megathunder.rollout.routing import RequestRouter, build_policy, build_router
from megathunder.rollout.routing.routing_policies import CacheAware
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.engine import Engine, EpisodeClock
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "policies" / "student"
OURS = ("round_robin", "least_loaded", "session", "cache_aware")
ROUTER = "sglang_router"
LEAST_GAIN, NOISE, LENGTHS_TO_MEET = 1.4, 1.1, 2
SPARE = 8
"""Tokens of its cache, and of the policy's positions, that a server gives to no request (SGLang: six)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy, one round."""

    observation_tokens: int
    policy: str
    round: int
    wall_s: float
    cpu_s: float
    prompt_tokens: int
    computed_tokens: int
    turns: int
    turn_p50_s: float
    turn_p95_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a policy to serve instead of random weights of the next two")
    parser.add_argument("--hidden", type=int, default=512, help="units of the policy that is made for this")
    parser.add_argument("--layers", type=int, default=6, help="its layers")
    parser.add_argument("--observations", type=int, nargs="+", default=[80, 160, 240], help="tokens of an observation")
    parser.add_argument("--cache-tokens", type=int, default=8192, help="cache of one server")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=16, help="requests on one server, cache_aware")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The rows, their summary, and whether every target was met. UserError, before a server starts, for options that
    ask for nothing or for traces that no server holds."""
    option_checks.at_least(arguments, observations=1, groups=1, group_size=1, in_flight=1, rounds=1, seed=0)
    if arguments.model:
        option_checks.policy_folder(arguments.model)
    refuse_what_no_server_holds(arguments)
    rows = asyncio.run(_measure(arguments))
    summary = summarise(rows, arguments)
    missed = missed_targets(summary)
    show_placement(summary, {row.observation_tokens: row.prompt_tokens for row in rows})
    for line in missed:
        print(f"missed: {line}")
    return {"rows": [dataclasses.asdict(row) for row in rows], "summary": summary, "missed": missed}, not missed


def refuse_what_no_server_holds(arguments: argparse.Namespace) -> None:
    """Raise UserError where the longest trace is longer than a server's cache or than the policy's positions."""
    positions = read_model_shape(str(arguments.model)).max_positions if arguments.model else LONGEST
    limits = {"a cache": arguments.cache_tokens, **({"the policy": positions} if positions else {})}
    holder = min(limits, key=limits.__getitem__)
    room = limits[holder] - SPARE
    for observation in arguments.observations:
        # Every trace has observations: one that is too long alone need not be drawn.
        longest = observation if observation > room else max(t.tokens for t in trace_of(arguments, observation))
        if longest > room:
            raise UserError(
                f"a trace of {longest} tokens or more with --observations {observation}, "
                f"where {holder} holds {limits[holder]}",
                expected=f"at most {max(room, 0)} tokens: {SPARE} stay free",
                remedy="give shorter --observations" + (", or more --cache-tokens" if holder == "a cache" else ""),
            )


async def _measure(arguments: argparse.Namespace) -> list[Row]:
    config = RolloutConfig(
        device="cpu",
        servers=2,
        max_total_tokens=arguments.cache_tokens,
        max_running_requests=32,
        max_tokens=arguments.cache_tokens,
        request_timeout_s=300.0,
    )
    policies = [*OURS, *([ROUTER] if importlib.util.find_spec(ROUTER) else [])]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or wide_policy(
            Path(folder) / "policy", TOKENIZER, hidden=arguments.hidden, layers=arguments.layers
        )
        pool = ServerPool(config, model, folder=Path(folder))
        async with EngineClient(timeout_s=300.0) as client, ServerControl(timeout_s=60.0) as control:
            await pool.start()
            try:
                for observation in arguments.observations:
                    bench = Bench(pool, control, client, config, policies, arguments, observation)
                    rows += await bench.rounds()
            finally:
                await pool.close()
    return rows


class Bench:
    """Every policy on one trace. A policy keeps its router over the rounds, as a run does over updates."""

    def __init__(
        self,
        pool: ServerPool,
        control: ServerControl,
        client: EngineClient,
        config: RolloutConfig,
        policies: list[str],
        arguments: argparse.Namespace,
        observation: int,
    ) -> None:
        self._pool, self._control, self._client, self._config = pool, control, client, config
        self._arguments, self._observation = arguments, observation
        self._routers: dict[str, RequestRouter] = {
            name: build_router(RoutingConfig(policy=name, in_flight=arguments.in_flight), config, pool)
            for name in policies
        }

    async def rounds(self) -> list[Row]:
        """Rows of every policy and round, the first round left out."""
        rows: list[Row] = []
        names = list(self._routers)
        for number in range(-1, self._arguments.rounds):
            shift = (number + 1) % len(names)
            for name in names[shift:] + names[:shift]:
                row = await self._once(name, number)
                print(
                    f"observation {row.observation_tokens:4d}  {name:13s} round {number:2d}  wall {row.wall_s:5.1f} s  "
                    f"cpu {row.cpu_s:5.1f} s  computed {row.computed_tokens:6d} of {row.prompt_tokens}  "
                    f"turn p50 {row.turn_p50_s:.2f} s p95 {row.turn_p95_s:.2f} s",
                    flush=True,
                )
                rows += [row] if number >= 0 else []
        for router in self._routers.values():
            await router.close()
        return rows

    async def _once(self, name: str, number: int) -> Row:
        for server in self._pool.ready:
            await self._control.flush_cache(server)
        engine = Engine(self._pool, self._client, self._config, self._routers[name])
        agents = [Agent(trace, engine, self._arguments.seed) for trace in trace_of(self._arguments, self._observation)]
        cpu_s, started_s = self._cpu_s(), time.monotonic()
        await asyncio.gather(*(agent.run() for agent in agents))
        turns = sorted(second for agent in agents for second in agent.turn_s)
        return Row(
            observation_tokens=self._observation,
            policy=name,
            round=number,
            wall_s=time.monotonic() - started_s,
            cpu_s=self._cpu_s() - cpu_s,
            prompt_tokens=sum(agent.prompt_tokens for agent in agents),
            computed_tokens=sum(agent.prompt_tokens - agent.cached_tokens for agent in agents),
            turns=len(turns),
            turn_p50_s=turns[len(turns) // 2],
            turn_p95_s=turns[int(0.95 * len(turns))],
        )

    def _cpu_s(self) -> float:
        """CPU seconds of the servers so far."""
        leaders = [psutil.Process(pid) for pid in self._pool.process_ids]
        family = [member for leader in leaders for member in (leader, *leader.children(recursive=True))]
        return sum(sum(member.cpu_times()[:2]) for member in family)


class Agent:
    """Plays one trace: real requests, the trace's observations and gaps."""

    def __init__(self, trace: AgentTrace, engine: Engine, seed: int) -> None:
        self._trace, self._engine, self._seed = trace, engine, seed
        self.turn_s: list[float] = []
        self.prompt_tokens = self.cached_tokens = 0

    async def run(self) -> None:
        """All its turns."""
        context, clock = list(self._trace.prompt), EpisodeClock(3600.0)
        for number, turn in enumerate(self._trace.turns):
            await asyncio.sleep(turn.gap_s)
            context += turn.observation
            sampling = SamplingParams(
                max_new_tokens=turn.action_tokens, ignore_eos=True, sampling_seed=self._seed + 1000 * number
            )
            started_s = time.monotonic()
            answer = await self._engine.generate(self._trace.id, context, sampling, policy_version=0, clock=clock)
            self.turn_s.append(time.monotonic() - started_s)
            self.prompt_tokens += answer.prompt_tokens
            self.cached_tokens += answer.cached_tokens
            context += answer.token_ids
        self._engine.release(self._trace.id)


def trace_of(arguments: argparse.Namespace, observation: int) -> tuple[AgentTrace, ...]:
    """The agents of one observation length."""
    return synthetic(
        groups=arguments.groups,
        group_size=arguments.group_size,
        observation_tokens=observation,
        vocabulary=(10, 500),
        seed=arguments.seed,
    )


def summarise(rows: list[Row], arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Medians of every policy and observation length, their ratios to round_robin, and the simulator's forecast."""
    summary: list[dict[str, object]] = []
    for observation in sorted({row.observation_tokens for row in rows}):
        chosen = [row for row in rows if row.observation_tokens == observation]
        base = _medians([row for row in chosen if row.policy == "round_robin"])
        for policy in dict.fromkeys(row.policy for row in chosen):
            medians = _medians([row for row in chosen if row.policy == policy])
            summary.append(
                {
                    "observation_tokens": observation,
                    "policy": policy,
                    **medians,
                    "wall_gain": base["wall_s"] / medians["wall_s"],
                    "cpu_gain": base["cpu_s"] / medians["cpu_s"],
                    "simulated_computed_tokens": None
                    if policy == ROUTER
                    else _foretold(policy, arguments, observation),
                }
            )
    return summary


def _medians(rows: list[Row]) -> dict[str, float]:
    names = ("wall_s", "cpu_s", "computed_tokens", "turn_p50_s", "turn_p95_s")
    return {name: statistics.median(getattr(row, name) for row in rows) for name in names}


def _foretold(policy: str, arguments: argparse.Namespace, observation: int) -> int:
    """Computed tokens on the simulator's clock, once the policy knows how long trajectories get."""
    rollout = RolloutConfig(max_total_tokens=arguments.cache_tokens, max_running_requests=32)
    rule = build_policy(RoutingConfig(policy=policy, in_flight=arguments.in_flight), rollout)
    traces = trace_of(arguments, observation)
    if isinstance(rule, CacheAware):
        rule.mean_tokens = statistics.mean(trace.tokens for trace in traces)
    outcome = simulate_placement(
        traces, rule, servers=2, cache_tokens=arguments.cache_tokens, max_running=32, seed=arguments.seed
    )
    return outcome.computed_tokens


def missed_targets(summary: list[dict[str, object]]) -> list[str]:
    """What was promised and not measured."""
    missed: list[str] = []
    ours = {row["observation_tokens"]: row for row in summary if row["policy"] == "cache_aware"}
    gains = {length: max(row["wall_gain"], row["cpu_gain"]) for length, row in ours.items()}
    wanted = min(LENGTHS_TO_MEET, len(gains))
    if sum(gain >= LEAST_GAIN for gain in gains.values()) < wanted:
        found = ", ".join(f"{gain:.2f} at {length}" for length, gain in gains.items())
        missed.append(f"gain over round_robin {found} tokens of observation: {LEAST_GAIN} wanted at {wanted} of these")
    for row in summary:
        mine = ours[row["observation_tokens"]]
        if row["policy"] != "cache_aware" and row["computed_tokens"] < mine["computed_tokens"]:
            seen = f"{row['computed_tokens']:.0f} computed tokens, cache_aware {mine['computed_tokens']:.0f}"
            missed.append(f"observation {row['observation_tokens']}: {row['policy']} has {seen}")
        if row["policy"] == ROUTER and mine["wall_s"] > NOISE * row["wall_s"]:
            missed.append(f"observation {row['observation_tokens']}: slower than {ROUTER}")
    return missed
