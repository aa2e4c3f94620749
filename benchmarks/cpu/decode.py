"""Seconds of one decode step of a live server, with the kernels and without, alternating on the same server.

    step = (wall of b requests of LONG tokens - wall of the same of SHORT tokens) / (LONG - SHORT)

so that reading the prompts and the way over HTTP cancel out.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.cpu.model import VOCABULARY, write_model
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.cpu_kernels.settings import CHOICES
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.types import ServerAddress

BATCHES, SHORT, LONG, PROMPT = (1, 8, 32), 8, 72, 120
PATHS = {"plain": "off", "kernels": "auto"}
TARGET = 0.4


async def measure_decode(rounds: int) -> dict[str, object]:
    """Medians and every round, in seconds, by batch and path; `ratio` is kernels over plain."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = RolloutConfig(device="cpu", max_tokens=1024)
        pool = ServerPool(config, write_model(folder / "model"), folder=folder, policy_version=1)
        await pool.start()
        try:
            found = await _rounds(pool.ready[0], rounds)
        finally:
            await pool.close()
    table = {}
    for batch, by_path in found.items():
        medians = {path: median(seconds) for path, seconds in by_path.items()}
        ratio = medians["kernels"] / medians["plain"]
        table[str(batch)] = {"median_s": medians, "rounds_s": by_path, "ratio": ratio, "target": TARGET}
        print(f"decode, batch {batch}: {1e3 * medians['plain']:.2f} -> {1e3 * medians['kernels']:.2f} ms ({ratio:.2f})")
    return table


async def _rounds(server: ServerAddress, rounds: int) -> dict[int, dict[str, list[float]]]:
    found: dict[int, dict[str, list[float]]] = {b: defaultdict(list) for b in BATCHES}
    async with EngineClient(timeout_s=300.0) as client, ServerControl(timeout_s=30.0) as control:
        for number in range(rounds + 1):
            for batch in BATCHES:
                for path, choice in PATHS.items():
                    await control.set_state(server, {"cpu_kernels": CHOICES.index(choice)})
                    walls = [await _wall(client, control, server, batch, tokens) for tokens in (SHORT, LONG)]
                    if number:  # the first round warms up
                        found[batch][path].append((walls[1] - walls[0]) / (LONG - SHORT))
    return found


async def _wall(client: EngineClient, control: ServerControl, server: ServerAddress, batch: int, tokens: int) -> float:
    rng = random.Random(batch)
    prompts = [tuple(rng.randrange(1, VOCABULARY) for _ in range(PROMPT)) for _ in range(batch)]
    await control.flush_cache(server)
    started = time.perf_counter()
    samplings = [SamplingParams(max_new_tokens=tokens, ignore_eos=True, sampling_seed=i) for i in range(batch)]
    await asyncio.gather(*(client.generate(server, p, s) for p, s in zip(prompts, samplings, strict=True)))
    return time.perf_counter() - started
