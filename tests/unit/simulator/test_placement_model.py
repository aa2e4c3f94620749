"""The prefix-cache model, the server model, and placement on a virtual clock."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.agent_traces import AgentTrace, synthetic
from benchmarks.papers.placement_model import simulate_placement
from benchmarks.papers.radix_cache import RadixCache
from megathunder.rollout.routing.routing_policies import CacheAware, LeastLoaded, RoundRobin, SessionAffinity


def served(cache: RadixCache, prompt: tuple[int, ...], samples: tuple[int, ...] = ()) -> int:
    """One request from begin to end; how much of its prompt was cached."""
    held = cache.begin(prompt)
    for _ in samples[1:]:
        assert cache.grow(held)
    cache.end(held, prompt + samples)
    return held.cached_tokens


def test_a_prompt_is_reused_but_for_its_last_token_and_the_last_sampled_token_never():
    cache = RadixCache(100)
    assert served(cache, (1, 2, 3, 4), (5, 6, 7)) == 0
    assert served(cache, (1, 2, 3, 4)) == 3
    assert served(cache, (1, 2, 3, 4, 5, 6, 7, 8)) == 6
    assert served(cache, (1, 2, 9)) == 2


def test_the_least_recently_used_leaf_is_evicted():
    cache = RadixCache(10)
    served(cache, (1, 1, 1, 1)), served(cache, (2, 2, 2, 2)), served(cache, (1, 1, 1, 1))
    served(cache, (3, 3, 3, 3))
    assert served(cache, (1, 1, 1, 1)) == 3 and served(cache, (2, 2, 2, 2)) == 0


def test_what_a_request_stands_on_is_not_evicted_and_no_room_changes_nothing():
    cache = RadixCache(10)
    held = cache.begin((1, 2, 3, 4, 5, 6))
    assert cache.begin((9, 9, 9, 9, 9)) is None and cache.begin((8, 8, 8), reserve=2) is None
    assert cache.free == 4
    cache.end(held, (1, 2, 3, 4, 5, 6))
    assert cache.begin((9, 9, 9, 9, 9)) is not None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 4)), max_size=25))
def test_the_tree_is_a_set_of_prefixes_within_its_capacity(requests):
    cache, seen = RadixCache(16), set()
    for prompt, samples in requests:
        prompt, sampled = tuple(prompt), tuple(range(samples))
        cached = served(cache, prompt, sampled)
        assert cached < len(prompt) and (cached == 0 or prompt[:cached] in seen)
        whole = (prompt + sampled)[:-1]
        seen.update(whole[:length] for length in range(1, len(whole) + 1))
        assert cache.free + cache.evictable == 16 and cache.free >= 0


def outcomes(traces: tuple[AgentTrace, ...], **cache) -> dict:
    expected = statistics.mean(trace.tokens for trace in traces)
    aware = CacheAware(cache_tokens=7372, in_flight=16, spill_gap=8, spill_tokens=1024, mean_tokens=expected)
    rules = {
        "round_robin": RoundRobin(),
        "least_loaded": LeastLoaded(),
        "session": SessionAffinity(),
        "cache_aware": aware,
    }
    where = {"servers": 2, "cache_tokens": 8192, "max_running": 32, **cache}
    return {name: simulate_placement(traces, rule, **where) for name, rule in rules.items()}


@pytest.mark.parametrize("observation", [160, 240])
def test_scarce_caches_reward_homes_and_admission(observation):
    computed = {n: o.computed_tokens for n, o in outcomes(synthetic(groups=6, group_size=4, seed=1,
        observation_tokens=observation)).items()}  # fmt: skip
    assert computed["cache_aware"] <= computed["session"] < computed["least_loaded"]
    assert computed["round_robin"] > 1.5 * computed["cache_aware"]


def test_an_ample_cache_computes_every_token_once_at_home():
    traces = synthetic(groups=2, group_size=2, seed=3)
    found = outcomes(traces, cache_tokens=10**6)["session"]
    fresh = sum(trace.tokens - len(trace.prompt) for trace in traces)
    # the last sampled token of a turn is computed with the next one; of a prompt, what its first home computed
    assert found.computed_tokens < fresh + sum(len(trace.prompt) for trace in traces)
    assert found.moves == 0 and len(found.turn_s) == sum(len(trace.turns) for trace in traces)


def test_a_cache_in_which_one_agent_barely_fits_still_ends():
    traces = synthetic(groups=3, group_size=2, observation_tokens=60, seed=2)
    longest = max(trace.tokens for trace in traces)
    for outcome in outcomes(traces, cache_tokens=longest + 16).values():
        assert len(outcome.turn_s) == sum(len(trace.turns) for trace in traces)


def test_the_same_seed_gives_the_same_outcome():
    traces = synthetic(groups=3, group_size=3, seed=5)
    assert outcomes(traces) == outcomes(traces)
