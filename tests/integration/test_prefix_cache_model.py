"""The model of a prefix cache against a real server's, request by request."""

from __future__ import annotations

import asyncio
import random

from tiny_model import VOCABULARY, make_model

from benchmarks.papers.radix_cache import RadixCache
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool

CACHE, SAMPLED, REQUESTS = 400, 5, 60
CONFIG = RolloutConfig(device="cpu", ignore_eos=True, max_total_tokens=CACHE, max_tokens=CACHE)


def test_the_cache_model_foretells_what_a_server_finds_cached(tmp_path):
    make_model(tmp_path / "model")
    cached = asyncio.run(asyncio.wait_for(compare(tmp_path), 120))
    real, modelled = zip(*cached)
    assert real == modelled
    assert len(set(real)) > 10 and 0 in real[5:], "hits of many lengths, and evictions"


async def compare(folder) -> list[tuple[int, int]]:
    """(cached_tokens of the server, of the model) for agents that take turns in random order in a cache too small."""
    chance, model = random.Random(7), RadixCache(CACHE)
    pool = ServerPool(CONFIG, folder / "model", folder=folder / "logs")
    await pool.start()
    try:
        async with EngineClient(timeout_s=30.0) as client:
            prompts = [tuple(chance.randrange(VOCABULARY) for _ in range(20)) for _ in range(3)]
            contexts = [prompts[agent % 3] for agent in range(9)]
            found = []
            for _ in range(REQUESTS):
                agent = chance.randrange(len(contexts))
                prompt = contexts[agent] if len(contexts[agent]) < 150 else prompts[agent % 3]
                sampling = SamplingParams(max_new_tokens=SAMPLED, ignore_eos=True)
                answer = await client.generate(pool.ready[0], prompt, sampling)
                held = model.begin(prompt)
                for _ in range(SAMPLED - 1):
                    model.grow(held)
                model.end(held, prompt + answer.token_ids)
                found.append((answer.cached_tokens, held.cached_tokens))
                observation = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randrange(5, 25)))
                contexts[agent] = prompt + answer.token_ids + observation
            return found
    finally:
        await pool.close()
