"""Suffix speculation on real servers: what is sampled is the model's, drafted or not.

Three servers of one model: plain; drafting whenever it can; and a broken one, whose drafted steps take the likeliest
token in the place of a sample.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest
import torch
from sampled_truth import Cut, Drawn, pairs, pooled, transformed, uniformity
from tiny_model import VOCABULARY, make_model

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.rollout.servers import command
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.speculation.origin import Origin

CONFIG = RolloutConfig(device="cpu")
ALWAYS = SpeculationConfig(gate=False)
TOKENS = 20
BROKEN = """
from megathunder.speculation import worker

def install():
    keep = worker.SuffixWorker._keep
    def greedy(self, result, drafts, return_logprob):
        result.next_token_ids = result.logits_output.next_token_logits.argmax(-1)
        return keep(self, result, drafts, return_logprob)
    worker.SuffixWorker._keep = greedy
"""


def break_verification(folder, monkeypatch):
    """A plug-in on the path of servers started from here on."""
    (folder / "broken_verification.py").write_text(BROKEN)
    about = folder / "broken_verification-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-verification\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nbroken_verification = broken_verification:install\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(command, "CPU_PLUGINS", (*command.CPU_PLUGINS, "broken_verification"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Pools `plain`, `drafting`, `broken`, the model in transformers, and a loop."""
    folder, logs = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("logs")
    model = make_model(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.5)  # some tokens far likelier than others, as in a policy
    model.save_pretrained(folder)
    drafting = {"plain": None, "drafting": ALWAYS, "broken": ALWAYS}
    pools = {
        name: ServerPool(CONFIG, folder, folder=logs, name=name, policy_version=1, speculation=speculation)
        for name, speculation in drafting.items()
    }
    with asyncio.Runner() as runner, pytest.MonkeyPatch.context() as patch:

        async def start():
            good = [asyncio.create_task(pools[name].start()) for name in ("plain", "drafting")]
            await asyncio.sleep(0)  # their environments are made
            await asyncio.sleep(0.5)
            break_verification(folder, patch)
            await asyncio.gather(*good, pools["broken"].start())

        runner.run(start())
        yield SimpleNamespace(run=runner.run, model=model, pools=pools, folder=folder)
        for pool in pools.values():
            runner.run(pool.close())


WHOLE = Cut()


def draw(served, name, how=WHOLE, *, requests=64, tokens=TOKENS, prompts=4, seed=0, **extra):
    """`requests` continuations of a few prompts, each with its own seed, all in flight at once."""
    rng = random.Random(5)
    given = [tuple(rng.randrange(1, VOCABULARY) for _ in range(10)) for _ in range(prompts)]

    def sampling(i):
        return SamplingParams(
            max_new_tokens=tokens,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            min_p=how.min_p,
            ignore_eos="stop_token_ids" not in extra,
            sampling_seed=1000 * seed + i,
            custom_params=Origin(trajectory=f"{seed}/{i}", group=f"{seed}/{i % prompts}", task=f"{i % prompts}"),
            **extra,
        )

    async def main():
        async with EngineClient(timeout_s=60.0) as client:
            server = served.pools[name].ready[0]
            places = asyncio.Semaphore(12)

            async def one(i):
                async with places:
                    return await client.generate(server, given[i % prompts], sampling(i))

            return await asyncio.gather(*map(one, range(requests)))

    done = served.run(main())
    return [Drawn(given[i % prompts], g.token_ids, g.logprobs) for i, g in enumerate(done)]


def control(served, name, act):
    async def main():
        async with ServerControl(timeout_s=20.0) as control:
            return await act(control, served.pools[name].ready[0])

    return served.run(main())


def counts(served, name="drafting"):
    return control(served, name, lambda control, server: control.speculation(server))


CUTS = [WHOLE, Cut(temperature=0.6), Cut(top_p=0.8), Cut(top_k=12), Cut(min_p=0.1), Cut(0.8, 30, 0.9, 0.02)]


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_the_same_seeds_give_the_same_tokens_and_logprobs_as_without_drafts(served, how):
    before = counts(served)
    with_drafts, without = draw(served, "drafting", how), draw(served, "plain", how)
    after = counts(served)
    assert after.accepted_tokens - before.accepted_tokens > 20
    differ = [i for i, (a, b) in enumerate(zip(with_drafts, without)) if a.tokens != b.tokens]
    assert len(differ) <= 1  # rounding may move a draw across a boundary
    u, worst = transformed(served.model, with_drafts, how)
    assert worst < 1e-4
    assert uniformity(u) > 1e-3 and pairs(u) > 1e-3


def test_tokens_follow_the_model_and_the_broken_server_is_found_out(served):
    plain = draw(served, "plain", requests=240, seed=1)
    drawn = {name: draw(served, name, requests=240, seed=2) for name in ("drafting", "broken")}
    u = {name: transformed(served.model, tokens, WHOLE)[0] for name, tokens in drawn.items()}
    assert uniformity(u["drafting"]) > 1e-3 and pairs(u["drafting"]) > 1e-3
    assert pooled(plain, drawn["drafting"], VOCABULARY) > 1e-3
    assert uniformity(u["broken"]) < 1e-6 and pairs(u["broken"]) < 1e-6


def test_greedy_requests_and_sampled_ones_share_a_drafted_batch(served):
    draw(served, "drafting", Cut(temperature=0.0), requests=8, seed=3)
    a, b = (draw(served, name, Cut(temperature=0.0), requests=8, seed=3) for name in ("drafting", "plain"))
    assert [d.tokens for d in a] == [d.tokens for d in b]


def test_the_step_that_reads_a_prompt_says_all_of_a_short_answer_it_has_seen(served):
    def ask(name):
        return draw(served, name, Cut(temperature=0.0), requests=1, tokens=6, prompts=1, seed=7)[0]

    ask("drafting")
    before = counts(served)
    known = ask("drafting")
    after = counts(served)
    assert after.steps - before.steps == 1 and after.accepted_tokens - before.accepted_tokens == 5
    plain = ask("plain")
    assert known.tokens == plain.tokens
    assert known.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_no_draft_reaches_past_the_token_budget_or_the_models_context(served):
    for tokens in (1, 2, 3, 5, 9):
        drawn = draw(served, "drafting", Cut(temperature=0.3), requests=24, tokens=tokens, prompts=2, seed=4)
        assert {len(d.tokens) for d in drawn} == {len(d.logprobs) for d in drawn} == {tokens}
    start = tuple([7, 8, 9] * 333)  # 999 of the 1024 positions the model has

    async def fill():
        async with EngineClient(timeout_s=60.0) as client:
            sampling = SamplingParams(max_new_tokens=22, temperature=0.0, ignore_eos=True)
            return [
                await client.generate(served.pools[name].ready[0], start, sampling)
                for name in ("drafting", "drafting", "plain")
            ]

    first, second, plain = served.run(fill())
    assert first.token_ids == second.token_ids == plain.token_ids and len(plain.token_ids) == 22


def test_a_stop_token_inside_a_kept_draft_ends_the_output_there(served):
    free = draw(served, "plain", Cut(temperature=0.3), requests=24, prompts=2, seed=5)
    stop = free[0].tokens[7]
    for _ in range(2):
        drawn = draw(served, "drafting", Cut(temperature=0.3), requests=24, prompts=2, seed=5, stop_token_ids=(stop, 0))
        for whole, cut_short in zip(free, drawn):
            ends = [i for i, token in enumerate(whole.tokens) if token in (stop, 0)]
            assert cut_short.tokens == whole.tokens[: ends[0] + 1 if ends else None]
            assert len(cut_short.logprobs) == len(cut_short.tokens)


def test_trajectories_survive_a_flush_and_new_weights(served):
    draw(served, "drafting", Cut(temperature=0.3), requests=8, prompts=1, seed=6)
    before = counts(served)

    async def renew(control, server):
        await control.open_update(server)
        await control.update_from_disk(server, folder=str(served.folder), version=2)
        await control.set_version(server, 1)

    control(served, "drafting", renew)
    drawn = draw(served, "drafting", Cut(temperature=0.3), requests=1, prompts=1, seed=6)
    after = counts(served)
    assert after.cached_tokens >= before.cached_tokens > 0
    assert after.accepted_tokens - before.accepted_tokens >= TOKENS // 2  # it repeats what it once sampled
    assert transformed(served.model, drawn, Cut(temperature=0.3))[1] < 1e-4


def test_drafting_is_switched_from_outside_and_counted(served):
    def switch(**numbers):
        return control(served, "drafting", lambda control, server: control.set_state(server, numbers))

    switch(speculation_max_draft_tokens=0)
    before = counts(served)
    draw(served, "drafting", requests=6)
    off = counts(served)
    assert off.drafted_tokens == before.drafted_tokens and off.steps > before.steps
    assert off.emitted_tokens - before.emitted_tokens == off.requests - before.requests
    switch(speculation_max_draft_tokens=ALWAYS.max_draft_tokens)
    draw(served, "drafting", requests=6)
    on = counts(served)
    assert on.drafted_tokens > off.drafted_tokens and on.max_draft_tokens == ALWAYS.max_draft_tokens
    switch(speculation_forget=1)
    assert on.cached_tokens > 0 == counts(served).cached_tokens
    with pytest.raises(Exception, match="refused"):
        switch(speculation_max_draft_tokens=ALWAYS.max_draft_tokens + 1)
    assert control(served, "drafting", lambda control, server: control.requests(server)) == 0
    assert counts(served, "plain") is None
