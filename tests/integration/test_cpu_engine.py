"""The CPU kernels on live servers: what they sample and score is what SGLang's own path does, for every family.

One server a family; which path it takes is switched while it runs.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from tiny_model import VOCABULARY
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.cpu_kernels.settings import CHOICES
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.speculation.origin import Origin

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "initializer_range": 0.1,
}
FAMILIES = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, mlp_only_layers=[1]
    ),
}
LARGEST = 2e-5  # of log-probabilities
DRAFTED = "qwen3"


def save_model(family, folder, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)  # a bias that is left out must show
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    first, second = (save_model(request.param, tmp_path_factory.mktemp("model"), seed) for seed in (0, 1))
    drafting = SpeculationConfig(gate=False) if request.param == DRAFTED else None
    pool = ServerPool(
        RolloutConfig(device="cpu"),
        first,
        folder=tmp_path_factory.mktemp("logs"),
        policy_version=1,
        speculation=drafting,
    )
    with asyncio.Runner() as runner:
        runner.run(pool.start())
        yield SimpleNamespace(run=runner.run, server=pool.ready[0], family=request.param, models=(first, second))
        runner.run(pool.close())


async def post(server, path, body):
    async with aiohttp.ClientSession() as session, session.post(server.url + path, json=body) as answer:
        return await answer.json()


async def computing_with(server):
    async with aiohttp.ClientSession() as session, session.get(server.url + "/server_info") as answer:
        return (await answer.json())["internal_states"][0]["cpu_kernels"]


async def switch(server, choice):
    assert await post(server, "/set_internal_state", {"server_args": {"cpu_kernels": CHOICES.index(choice)}}) == [True]


async def evidence(server, *, requests=12, at_once=12):
    """Tokens and log-probabilities, sampled and scored: prompts of many lengths, second turns behind cached ones."""
    rng = random.Random(3)
    prompts = [
        tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.choice((1, 3, 17, 40, 90)))) for _ in range(requests)
    ]
    places = asyncio.Semaphore(at_once)
    async with EngineClient(timeout_s=60.0) as client, ServerControl(timeout_s=30.0) as control:
        await control.flush_cache(server)

        async def one(i):
            async with places:
                ids, out = prompts[i], []
                for turn in range(2):
                    sampling = SamplingParams(
                        max_new_tokens=14,
                        temperature=0.0 if i % 3 == 0 else 1.0,
                        ignore_eos=True,
                        sampling_seed=10 * i + turn,
                        custom_params=Origin(trajectory=f"{i}", group="0", task="0"),
                    )
                    generation = await client.generate(server, ids, sampling)
                    out.append((generation.token_ids, generation.logprobs))
                    ids = (*ids, *generation.token_ids, 5, 6, 7)
                known = tuple(min(token, VOCABULARY - 2) for token in ids)  # SGLang scores the last of all as the first
                return [*out, ((), await client.score(server, known, 1))]

        return await asyncio.gather(*map(one, range(requests)))


def largest_difference(a, b):
    """Of log-probabilities; the tokens are equal."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    assert all(x[0] == y[0] for x, y in pairs)
    return max(abs(p - q) for x, y in pairs for p, q in zip(x[1], y[1], strict=True))


def test_tokens_are_equal_and_logprobs_close_with_the_kernels_and_without(served):
    async def act():
        found = {}
        for choice in ("off", "torch", "auto"):
            await switch(served.server, choice)
            found[choice] = await computing_with(served.server), await evidence(served.server)
        return found

    found = served.run(act())
    assert [name for name, _ in found.values()] == ["off", "torch", "compiled"]
    for choice in ("torch", "auto"):
        assert largest_difference(found[choice][1], found["off"][1]) <= LARGEST


def test_a_request_alone_samples_what_it_samples_among_others(served):
    async def act():
        await switch(served.server, "auto")
        return await evidence(served.server), await evidence(served.server, at_once=1)

    assert largest_difference(*served.run(act())) <= LARGEST


def test_new_weights_are_computed_with_at_once(served):
    async def act():
        await switch(served.server, "auto")
        found = []
        for model in (*served.models[::-1], served.models[0]):
            answer = await post(served.server, "/update_weights_from_disk", {"model_path": str(model)})
            assert answer["success"], answer
            ours = await evidence(served.server, requests=6)
            await switch(served.server, "off")
            found.append((ours, await evidence(served.server, requests=6)))
            await switch(served.server, "auto")
        return found

    found = served.run(act())
    assert all(largest_difference(ours, plain) <= LARGEST for ours, plain in found)
    assert found[0][0] != found[1][0]


def test_an_unknown_choice_is_refused(served):
    assert served.run(post(served.server, "/set_internal_state", {"server_args": {"cpu_kernels": 3}})) == [False]
