"""Straggler-aware group control: what it converges to, what it never does, and what it remembers."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megathunder.config.sagc import SagcConfig
from megathunder.rollout.group_size.sagc import Sagc, prompts_for
from megathunder.rollout.group_size.straggler import GroupOutcome, outcome, straggles

LADDERS = st.sampled_from([(4, 8, 16), (2, 3), (4,), (2, 4, 8, 16, 32)])


def play(
    sagc: Sagc, risk: dict[int, float], steps: range, rng: random.Random, groups: int = 8, prompt: str = ""
) -> tuple[list[int], list[float]]:
    """Sizes and straggler rates of steps whose groups straggle with probability risk[size]."""
    sizes, rates = [], []
    for step in steps:
        size = sagc.size(step)
        outcomes = [GroupOutcome(size=size, straggled=rng.random() < risk[size], prompt=prompt) for _ in range(groups)]
        sagc.observe(step, outcomes)
        sizes.append(size)
        rates.append(sum(o.straggled for o in outcomes) / groups)
    return sizes, rates


@pytest.mark.parametrize("target", [0.2, 0.35, 0.5])
@pytest.mark.parametrize("groups", [1, 8])
def test_the_long_run_rate_converges_to_the_target(target: float, groups: int) -> None:
    """A stationary stream whose ladder spans the target: some rung is below it, some above."""
    sagc = Sagc(SagcConfig(target_rate=target), 8, seed=1)
    _, rates = play(sagc, {4: 0.1, 8: 0.4, 16: 0.9}, range(4000), random.Random(2), groups)
    assert abs(sum(rates) / len(rates) - target) < 0.03


def test_the_rate_returns_to_the_target_when_the_stream_changes() -> None:
    sagc = Sagc(SagcConfig(target_rate=0.3), 8, seed=1)
    rng = random.Random(3)
    play(sagc, {4: 0.05, 8: 0.15, 16: 0.5}, range(1000), rng)
    _, rates = play(sagc, {4: 0.2, 8: 0.6, 16: 0.95}, range(1000, 4000), rng)
    assert abs(sum(rates[500:]) / 2500 - 0.3) < 0.03


@given(
    seed=st.integers(0, 10**6),
    target=st.floats(0.05, 0.95),
    step=st.floats(0.05, 5.0),
    risks=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_the_dual_bounds_the_mean_rate_on_any_stream(seed: int, target: float, step: float, risks: list[float]) -> None:
    """mean S <= delta + lambda_N / (eta N), whatever the stream does, below the limit."""
    sagc = Sagc(SagcConfig(target_rate=target, dual_step=step, dual_limit=1e9), 8, seed)
    risk = dict(zip((4, 8, 16), risks, strict=True))
    _, rates = play(sagc, risk, range(60), random.Random(seed))
    assert sum(rates) / 60 <= target + sagc.multiplier / (step * 60 * 8) + 1e-9


@given(
    seed=st.integers(0, 10**6), rates=st.lists(st.integers(0, 8), min_size=1, max_size=50), limit=st.floats(0.1, 3.0)
)
@settings(max_examples=60, deadline=None)
def test_the_multiplier_is_the_projected_ascent(seed: int, rates: list[int], limit: float) -> None:
    sagc, want = Sagc(SagcConfig(dual_limit=limit), 4, seed), 0.0
    for step, straggled in enumerate(rates):
        size = sagc.size(step)
        sagc.observe(step, [GroupOutcome(size=size, straggled=i < straggled) for i in range(8)])
        for i in range(8):
            want = min(limit, max(0.0, want + 0.1 * ((i < straggled) - 0.3)))
        assert sagc.multiplier == pytest.approx(want) and 0.0 <= sagc.multiplier <= limit


@given(ladder=LADDERS, seed=st.integers(0, 10**6), flips=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_only_neighbouring_moves(ladder: tuple[int, ...], seed: int, flips: int) -> None:
    """From update to update; of a prompt that moves by itself, from one of its groups to the next."""
    first = ladder[len(ladder) // 2]
    for prior, prompts in (("off", ("",)), ("kind", ("short", "long"))):
        sagc, rng = Sagc(SagcConfig(sizes=ladder, prompt_prior=prior), first, seed), random.Random(flips)
        sizes: dict[str, list[int]] = {prompt: [] for prompt in prompts}
        for step in range(60):
            outcomes = []
            for prompt in prompts:
                sizes[prompt].append(sagc.size(step, prompt))
                straggled = rng.random() < (0.95 if prompt == "long" else 0.2)
                outcomes.append(GroupOutcome(size=sizes[prompt][-1], straggled=straggled, prompt=prompt))
            sagc.observe(step, outcomes)
        for moves in sizes.values():
            assert moves[0] == first
            assert all(abs(ladder.index(a) - ladder.index(b)) <= 1 for a, b in itertools.pairwise(moves))


def test_without_stragglers_the_largest_size_is_taken_and_the_multiplier_stays_zero() -> None:
    sagc = Sagc(SagcConfig(), 4, seed=0)
    sizes, _ = play(sagc, {4: 0.0, 8: 0.0, 16: 0.0}, range(10), random.Random(0))
    assert sizes == [4, 8] + [16] * 8 and sagc.multiplier == 0.0


def test_where_every_size_straggles_the_smallest_is_taken_and_the_limit_lets_it_recover() -> None:
    sagc = Sagc(SagcConfig(dual_limit=20.0), 16, seed=0)
    rng = random.Random(0)
    sizes, _ = play(sagc, {4: 0.8, 8: 0.97, 16: 1.0}, range(300), rng)
    assert sizes[-100:].count(4) > 60 and sagc.multiplier == 20.0
    sizes, _ = play(sagc, {4: 0.0, 8: 0.02, 16: 0.05}, range(300, 500), rng)
    assert sizes[-50:].count(16) > 40


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_restored_controller_goes_on_bit_for_bit(ahead: int) -> None:
    """Saved between updates, or while the next one (or two, sampled one ahead) was already chosen."""
    risk, config = {4: 0.1, 8: 0.4, 16: 0.9}, SagcConfig(prompt_prior="kind")
    straight, rng = Sagc(config, 8, seed=5), random.Random(7)
    play(straight, risk, range(40), rng, prompt="a")
    for step in range(40, 40 + ahead):
        straight.size(step)
    saved, drawn = straight.encode(), rng.getstate()
    want = play(straight, risk, range(40, 80), rng, prompt="a")
    resumed = Sagc(config, 8, seed=5)
    resumed.decode(saved)
    rng.setstate(drawn)
    assert play(resumed, risk, range(40, 80), rng, prompt="a") == want
    assert resumed.encode() == straight.encode()


def test_a_question_is_answered_alike_however_often_it_is_asked() -> None:
    sagc = Sagc(SagcConfig(prompt_prior="kind"), 8, seed=0)
    play(sagc, {4: 0.1, 8: 0.4, 16: 0.9}, range(20), random.Random(0), prompt="a")
    assert len({(sagc.size(20), sagc.size(20, "a")) for _ in range(5)}) == 1
    before = sagc.encode()
    sagc.observe(19, [GroupOutcome(size=8, straggled=True)])
    assert sagc.encode() == before, "a batch that is learnt from a second time teaches nothing"


def test_another_ladder_goes_on_from_the_nearest_rung() -> None:
    sagc = Sagc(SagcConfig(), 8, seed=0)
    play(sagc, {4: 0.0, 8: 0.0, 16: 0.0}, range(5), random.Random(0))
    other = Sagc(SagcConfig(sizes=(6, 12, 24)), 6, seed=0)
    other.decode(sagc.encode())
    assert other.size(4) in (12, 24) and other.posterior(6) == (1.0, 1.0)


def test_prompts_that_straggle_get_smaller_groups_and_the_rate_still_converges() -> None:
    risk = {"calm": {4: 0.02, 8: 0.05, 16: 0.1}, "wild": {4: 0.3, 8: 0.7, 16: 0.98}}
    sagc, rng = Sagc(SagcConfig(prompt_prior="kind"), 8, seed=0), random.Random(1)
    rates, sizes = [], {"calm": [], "wild": []}
    for step in range(3000):
        outcomes = []
        for kind in ("calm", "wild") * 4:
            size = sagc.size(step, kind)
            sizes[kind].append(math.log2(size))
            outcomes.append(GroupOutcome(size=size, straggled=rng.random() < risk[kind][size], prompt=kind))
        sagc.observe(step, outcomes)
        rates.append(sum(o.straggled for o in outcomes) / 8)
    mean = {kind: sum(values) / len(values) for kind, values in sizes.items()}
    assert mean["calm"] - mean["wild"] > 0.5
    assert abs(sum(rates) / 3000 - 0.3) < 0.03


def test_the_posterior_counts_decay_towards_the_prior() -> None:
    sagc = Sagc(SagcConfig(forgetting=0.5), 8, seed=0)
    sagc.observe(0, [GroupOutcome(size=8, straggled=True), GroupOutcome(size=8, straggled=False)])
    assert sagc.posterior(8) == (2.0, 2.0)
    sagc.observe(1, [GroupOutcome(size=8, straggled=True)])
    assert sagc.posterior(8) == (1.0 + 0.5 + 1.0, 1.0 + 0.5)
    sagc.observe(2, [])
    assert sagc.posterior(8) == (1.0 + 0.75, 1.0 + 0.25) and sagc.posterior(16) == (1.0, 1.0)


def test_the_event_on_hand_counted_groups() -> None:
    assert straggles([1, 1, 1, 2], 1.5) and not straggles([1, 1, 2, 2], 1.5)
    assert not straggles([0, 0, 0], 1.5) and straggles([0, 0, 1], 1.5)
    assert outcome(4, [3.0], 1.5) is None
    found = outcome(4, [1.0, 1.0, 9.0], 1.5, "a")
    assert found == GroupOutcome(size=4, straggled=True, prompt="a"), "of four asked for, three came"


@given(target=st.integers(1, 500), size=st.integers(2, 64))
def test_prompts_make_about_the_target(target: int, size: int) -> None:
    prompts = prompts_for(target, size)
    assert prompts == 1 or abs(prompts * size - target) <= size / 2
