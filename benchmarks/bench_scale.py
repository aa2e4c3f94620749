"""The coordinator's routing at scale, before a stand-in engine: milliseconds of one core per event.

    python benchmarks/bench_scale.py [--json out.json] [--naive]

Trajectories of four turns in groups of sixteen arrive at once; when a turn of any of them ends, its server takes what
the policy lets go. An event is an arrival, an end or a release, each followed by grants. `--naive` measures the oracle
of tests/oracles/ beside it, alternating, and says the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from pathlib import Path

from megathunder.rollout.routing import Request, RoutingState
from megathunder.rollout.routing.routing_policies import CacheAware
from megathunder.types import TrajectoryId

CASES = (  # trajectories, servers, in flight per server, cache tokens per server
    (512, 16, 64, 60_000),
    (2048, 64, 64, 60_000),
    (2048, 64, 16, 60_000),
    (4096, 64, 64, 60_000),
    (2048, 8, 256, 200_000),
)
TURNS, GROUP, PROMPT, GROWTH, ROUNDS = 4, 16, 400, 300, 3


def drive(state: RoutingState, trajectories: int, servers: int, seed: int) -> tuple[float, float, int]:
    """(ms per event, the longest event in ms, events) until every trajectory has ended."""
    names, drawn, running, events, serial = tuple(f"s{i}" for i in range(servers)), random.Random(seed), deque(), [], 0
    left = {TrajectoryId(0, i // GROUP, i % GROUP): TURNS for i in range(trajectories)}

    def event(change: object, *arguments: object, **named: object) -> None:
        started = time.perf_counter()
        change(*arguments, **named)
        granted = state.grants(names)
        events.append(time.perf_counter() - started)
        running.extend(granted)

    def ask(trajectory: TrajectoryId, tokens: int) -> None:
        nonlocal serial
        serial += 1
        event(state.arrive, Request(trajectory=trajectory, tokens=tokens, serial=serial))

    for trajectory in left:
        ask(trajectory, PROMPT)
    while running:
        running.rotate(drawn.randrange(8))
        request, server = running.popleft()
        tokens = request.tokens + drawn.randrange(GROWTH)
        event(state.ended, request, server, tokens=tokens)
        left[request.trajectory] -= 1
        if left[request.trajectory]:
            ask(request.trajectory, tokens)
        else:
            event(state.release, request.trajectory)
    assert not any(left.values()), "a request was never granted"
    return 1e3 * sum(events) / len(events), 1e3 * max(events), len(events)


def measure(case: tuple[int, int, int, int], naive: bool) -> dict[str, object]:
    """Medians over the rounds, the oracle's in between."""
    trajectories, servers, in_flight, cache = case
    limits = {"cache_tokens": cache, "in_flight": in_flight, "spill_gap": 8, "spill_tokens": 1024}
    ours, theirs = [], []
    for seed in range(ROUNDS):
        ours.append(drive(RoutingState(CacheAware(**limits)), trajectories, servers, seed))
        if naive:
            from oracles.naive_routing import NaiveCacheAware, NaiveRoutingState

            theirs.append(drive(NaiveRoutingState(NaiveCacheAware(**limits)), trajectories, servers, seed))
    found: dict[str, object] = {
        "trajectories": trajectories,
        "servers": servers,
        "in_flight": in_flight,
        "cache_tokens": cache,
        "ms_per_event": [run[0] for run in ours],
        "longest_ms": [run[1] for run in ours],
        "median_ms": statistics.median(run[0] for run in ours),
    }
    if naive:
        found["naive_ms_per_event"] = [run[0] for run in theirs]
        found["speedup"] = statistics.median(run[0] for run in theirs) / found["median_ms"]
    return found


def main(argv: list[str]) -> int:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--naive", action="store_true")
    options = parser.parse_args(argv)
    if options.naive:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    rows = []
    for case in CASES:
        rows.append(measure(case, options.naive))
        shown = {name: value for name, value in rows[-1].items() if not isinstance(value, list)}
        print(json.dumps(shown), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"routing": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
