"""Suffix speculation against a plain server: tokens a second, CPU seconds, accept length, what the gate decided.

    traces    shell      turns of agents at work on the shell tasks, recorded here, asked again with other seeds
              repeating  groups of 8 at one prompt each, low temperature: what earlier trajectories said is said again
              fresh      prompts nobody asked before at a temperature at which nothing recurs
    variants  plain      a server without speculation
              gated      a drafting server as a run has it
              ungated    another drafting server, which drafts whenever it can

For every trace and concurrency, each round asks the three in turn for the same requests with the same seeds: lossless
speculation gives the same tokens, which is checked, so that work is equal. As in a run, `concurrency` trajectories are
in flight, the turns of each one after the other. The prefix caches are flushed before each variant is
arguments. The cache
of trajectories knows one pass over the trace before it is measured, as after a first update.
Ratios are of tokens a second to the plain server's in the same round, medians over rounds (twice as many on `fresh`,
where a few percent decide). A CPU second counts all of a server's processes. Targets: gated at least 1.4 at
concurrency 1 to 4 on the recurring traces, at least 0.95 at every concurrency on `fresh`, and 0.9 of the ungated gain
on the recurring ones.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rollout import option_checks
from benchmarks.rollout.serving import Served, serving, stopwatch
from benchmarks.rollout.traces import Request, Trace, fresh, record, repeating
from megathunder.config.model_shape import read_model_shape
from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.rollout.servers.client import EngineClient, Generation
from megathunder.rollout.servers.control import ServerControl

VARIANTS = ("plain", "gated", "ungated")
RECURRING = ("shell", "repeating")
LEAST_GAIN, LEAST_FRESH, KEPT = 1.4, 0.95, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant asked once."""

    trace: str
    concurrency: int
    round: int
    variant: str
    tokens: int
    wall_s: float
    cpu_s: float
    steps: int
    steps_drafted: int
    steps_shut: int
    requests: int
    drafted_tokens: int
    accepted_tokens: int
    same_tokens: float  # share of requests with the plain server's tokens

    @property
    def accept_length(self) -> float:
        """Tokens a request and step."""
        return 1 + self.accepted_tokens / max(self.requests, 1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=Path("examples/policies/student_large"))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--traces", nargs="+", choices=[*RECURRING, "fresh"], default=[*RECURRING, "fresh"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=12, help="shell tasks recorded, 8 attempts each")
    parser.add_argument("--seconds", type=float, default=1.2, help="about how long the plain server is asked at a time")
    parser.add_argument("--seed", type=int, default=0)


def measure(arguments: argparse.Namespace) -> tuple[dict[str, object], bool]:
    """The rows, their summary, and whether every target was met. UserError, before a server starts, for options that
    ask for nothing."""
    option_checks.at_least(arguments, concurrency=1, rounds=1, tasks=1, seed=0)
    option_checks.lasting(arguments.seconds)
    option_checks.policy_folder(arguments.model)
    rows = asyncio.run(_measure(arguments))
    summary = summarise(rows)
    missed = missed_targets(summary)
    for line in missed:
        print(f"missed: {line}")
    return {"rows": [dataclasses.asdict(row) for row in rows], "summary": summary, "missed": missed}, not missed


async def _measure(arguments: argparse.Namespace) -> list[Row]:
    config = RolloutConfig(device="cpu", max_tokens=512, sglang={"random_seed": str(arguments.seed)})
    variants = {"plain": None, "gated": SpeculationConfig(), "ungated": SpeculationConfig(gate=False)}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            serving(config, arguments.model, Path(folder), variants) as servers,
            ServerControl(timeout_s=60.0) as control,
            EngineClient(timeout_s=120.0) as client,
        ):
            bench = Bench(servers, control, client, arguments)
            rows: list[Row] = []
            for name in arguments.traces:
                rows += await bench.trace(name, await _trace(name, arguments, config, servers["plain"]))
    return rows


async def _trace(name: str, arguments: argparse.Namespace, config: RolloutConfig, plain: Served) -> Trace:
    vocabulary = read_model_shape(str(arguments.model)).vocabulary
    if name == "shell":
        return await record(plain.pool, arguments.model, arguments.tasks, config, arguments.seed)
    return (repeating if name == "repeating" else fresh)(vocabulary, arguments.seed)


class Bench:
    """A server for each variant: one that drafted must not find in its cache what another variant was just told."""

    def __init__(
        self, servers: dict[str, Served], control: ServerControl, client: EngineClient, arguments: argparse.Namespace
    ) -> None:
        self._server = servers
        self._control, self._client, self._arguments = control, client, arguments
        self._update = 0

    async def trace(self, name: str, trace: Trace) -> list[Row]:
        """Every concurrency, every round, every variant."""
        for variant in VARIANTS[1:]:
            await self._ask(variant, trace, concurrency=8)  # what an earlier update left behind
        rows = []
        for concurrency in self._arguments.concurrency:
            count = await self._fitting(trace, concurrency)
            for round in range(self._arguments.rounds * (2 if name == "fresh" else 1)):
                self._update += 1
                chosen = [trace[(round * count + i) % len(trace)] for i in range(count)]
                if name == "fresh":
                    chosen = _never_asked(chosen, self._update)
                order = VARIANTS[round % 3 :] + VARIANTS[: round % 3]
                rows += await self._round(name, concurrency, round, chosen, order)
            _print(name, concurrency, [row for row in rows if row.concurrency == concurrency])
        return rows

    async def _fitting(self, trace: Trace, concurrency: int) -> int:
        """How many trajectories take the plain server about as long as it should be asked, full at all times."""
        probe = trace[: max(2, concurrency)]
        with stopwatch() as wall_s:
            await self._ask("plain", probe, concurrency)
        wanted = round(self._arguments.seconds / wall_s[0] * len(probe))
        return max(1, min(wanted, len(trace)) // concurrency) * concurrency

    async def _round(self, name: str, concurrency: int, round: int, chosen: Trace, order: Sequence[str]) -> list[Row]:
        taken: dict[str, tuple[Row, list[Generation]]] = {}
        for variant in order:
            taken[variant] = await self._turn(name, concurrency, round, variant, chosen)
        plain = [generation.token_ids for generation in taken["plain"][1]]
        return [
            dataclasses.replace(row, same_tokens=sum(g.token_ids == p for g, p in zip(done, plain)) / len(plain))
            for row, done in taken.values()
        ]

    async def _turn(
        self, name: str, concurrency: int, round: int, variant: str, chosen: Trace
    ) -> tuple[Row, list[Generation]]:
        served = self._server[variant]
        await self._control.flush_cache(served.address)
        before, cpu_s = await self._control.speculation(served.address), served.cpu_s()
        with stopwatch() as wall_s:
            done = await self._ask(variant, chosen, concurrency)
        spent_s, after = served.cpu_s() - cpu_s, await self._control.speculation(served.address)
        names = ("steps", "steps_drafted", "steps_shut", "requests", "drafted_tokens", "accepted_tokens")
        counted = {n: getattr(after, n) - getattr(before, n) if after and before else 0 for n in names}
        tokens = sum(len(generation.token_ids) for generation in done)
        row = Row(
            trace=name,
            concurrency=concurrency,
            round=round,
            variant=variant,
            tokens=tokens,
            wall_s=wall_s[0],
            cpu_s=spent_s,
            same_tokens=0.0,
            **counted,
        )
        return row, done

    async def _ask(self, variant: str, trace: Trace, concurrency: int) -> list[Generation]:
        """All turns of all trajectories, `concurrency` of which are in flight."""
        places, update = asyncio.Semaphore(concurrency), self._update
        address = self._server[variant].address

        async def one(index: int, turns: Sequence[Request]) -> list[Generation]:
            async with places:
                seeds = (100_000 * update + 100 * index + turn for turn in range(len(turns)))
                return [
                    await self._client.generate(address, turn.prompt, turn.sampling(seed, update))
                    for turn, seed in zip(turns, seeds)
                ]

        done = await asyncio.gather(*(one(i, turns) for i, turns in enumerate(trace)))
        return [generation for generations in done for generation in generations]


def _never_asked(trace: Trace, update: int) -> Trace:
    """The same with other prompts and tasks."""
    shift = 1 + update % 97
    return [
        tuple(
            dataclasses.replace(
                turn,
                prompt=turn.prompt[shift % len(turn.prompt) :] + turn.prompt[: shift % len(turn.prompt)],
                task=f"{turn.task}-{update}",
            )
            for turn in turns
        )
        for turns in trace
    ]


def summarise(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One line a trace and concurrency."""
    lines = []
    for trace, concurrency in dict.fromkeys((row.trace, row.concurrency) for row in rows):
        mine = [row for row in rows if (row.trace, row.concurrency) == (trace, concurrency)]
        by = {variant: [row for row in mine if row.variant == variant] for variant in VARIANTS}
        line: dict[str, object] = {"trace": trace, "concurrency": concurrency}
        line["plain_tokens_per_s"] = statistics.median(row.tokens / row.wall_s for row in by["plain"])
        for variant in VARIANTS[1:]:
            pairs = list(zip(by[variant], by["plain"]))
            line[f"{variant}_speedup"] = statistics.median(
                (a.tokens / a.wall_s) / (b.tokens / b.wall_s) for a, b in pairs
            )
            line[f"{variant}_cpu_speedup"] = statistics.median(
                (a.tokens / a.cpu_s) / (b.tokens / b.cpu_s) for a, b in pairs
            )
            line[f"{variant}_accept_length"] = statistics.fmean(row.accept_length for row in by[variant])
            line[f"{variant}_steps_drafted"] = _share(by[variant], "steps_drafted")
            line[f"{variant}_same_tokens"] = min(row.same_tokens for row in by[variant])
        line["gated_steps_shut"] = _share(by["gated"], "steps_shut")
        lines.append(line)
    return lines


def _share(rows: Sequence[Row], name: str) -> float:
    return sum(getattr(row, name) for row in rows) / max(sum(row.steps for row in rows), 1)


def missed_targets(summary: Sequence[dict[str, object]]) -> list[str]:
    """What the gated server did not reach."""
    missed = []
    for line in summary:
        where, gain, free = f"{line['trace']} at {line['concurrency']}", line["gated_speedup"], line["ungated_speedup"]
        if line["trace"] == "fresh":
            if gain < LEAST_FRESH:
                missed.append(f"{where}: {gain:.3f} of the plain server, at least {LEAST_FRESH}")
            continue
        if line["concurrency"] <= 4 and gain < LEAST_GAIN:
            missed.append(f"{where}: {gain:.2f} times the plain server, at least {LEAST_GAIN}")
        if gain < KEPT * free:
            missed.append(f"{where}: {gain:.2f} times the plain server where no gate gives {free:.2f}")
    return missed


def _print(name: str, concurrency: int, rows: Sequence[Row]) -> None:
    (line,) = summarise(rows)
    print(f"{name:10} at {concurrency:2}: plain {line['plain_tokens_per_s']:6.0f} tokens/s", end="")
    for variant in VARIANTS[1:]:
        keys = ("cpu_speedup", "accept_length", "steps_drafted", "same_tokens")
        shown = {key: line[f"{variant}_{key}"] for key in keys}
        details = ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in shown.items())
        print(f"   {variant} {line[f'{variant}_speedup']:.2f} ({details})", end="")
    print(f"   steps shut {line['gated_steps_shut']:.2f}", flush=True)
