"""The adapter to arctic-inference against the plain cache: same kin first, same bounds. Skipped where it is absent."""

from __future__ import annotations

import random
from array import array

import pytest

from megathunder.speculation.origin import Origin
from megathunder.speculation.patterns import PatternCache

pytest.importorskip("arctic_inference", reason="optional: pip install --no-deps -r requirements/speculation.txt")
from megathunder.speculation.arctic import EVERYTHING, ArcticCache

SHARED = [1, 2, 3, 4]


def fill(cache, *trajectories):
    for i, (origin, tokens) in enumerate(trajectories):
        cache.begin(f"r{i}", origin, tokens)
        cache.end(f"r{i}")
    return cache


def ask(cache, context, origin, limit=8):
    cache.begin("asks", origin, context)
    found = cache.draft("asks", limit)
    cache.end("asks")
    return found


def origin(name, group="", task=""):
    return Origin(trajectory=name, group=group, task=task)


def test_where_one_continuation_is_known_both_caches_draft_it():
    rng = random.Random(0)
    for _ in range(30):
        told = [rng.randrange(1000) for _ in range(40)]
        at = rng.randrange(4, 30)
        asker = origin("a", "g")
        plain, trees = (fill(kind(10_000), (origin("x", "g"), told)) for kind in (PatternCache, ArcticCache))
        expected = ask(plain, told[:at], asker).tokens
        assert ask(trees, told[:at], asker).tokens == expected == tuple(told[at : at + 8])


def test_the_nearest_kin_is_asked_first():
    everyone, task = (origin("z"), [*SHARED, 30]), (origin("y", "other", "task"), [*SHARED, 20])
    group = (origin("x", "group", "task"), [*SHARED, 10])
    asker = origin("a", "group", "task")
    for told in ([group, task, everyone], [task, everyone], [everyone]):
        assert (
            ask(fill(ArcticCache(99), *told), SHARED, asker).tokens
            == ask(fill(PatternCache(99), *told), SHARED, asker).tokens
        )


def test_no_draft_is_longer_than_the_limit_and_paths_only_become_less_likely():
    cache = fill(ArcticCache(10_000), *((origin(f"x{i}", "g"), [*SHARED, 7 if i % 3 else 9, 5, 6]) for i in range(9)))
    found = ask(cache, SHARED, origin("a", "g"), limit=2)
    assert found.tokens == (7, 5) and 1 > found.paths[0] >= found.paths[1] > 0


def test_a_trajectory_that_never_had_a_token_is_in_no_tree():
    cache = ArcticCache(3)
    for i, tokens in enumerate(([], SHARED)):
        cache.begin(f"r{i}", origin(f"t{i}", f"g{i}"), tokens)
        cache.end(f"r{i}")
    assert cache.tokens == 0 and list(cache._trees) == [EVERYTHING]


def test_tokens_come_as_sglang_keeps_them():
    cache = fill(ArcticCache(99), (origin("x", "g"), [*SHARED, 5, 6]))
    cache.begin("asks", origin("a", "g"), array("q", SHARED[:2]))
    cache.extend("asks", array("q", SHARED[2:]))
    assert cache.draft("asks", 8).tokens == (5, 6)


def test_eviction_returns_every_tree():
    rng = random.Random(1)
    cache = ArcticCache(0)
    for i in range(30):
        cache.begin(f"r{i}", origin(f"t{i % 7}", f"g{i % 3}", f"k{i % 2}"), [rng.randrange(5) for _ in range(20)])
        cache.extend(f"r{i}", [1, 2, 3])
        cache.end(f"r{i}")
    assert cache.tokens == 0 and list(cache._trees) == [EVERYTHING] and cache._trees[EVERYTHING].num_seqs() == 0
