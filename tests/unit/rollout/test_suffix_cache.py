"""The suffix cache: what it drafts, from whose trajectories, and what it forgets."""

from __future__ import annotations

import random

from megathunder.speculation.origin import Origin, read_origin
from megathunder.speculation.patterns import PLACES, PatternCache
from megathunder.speculation.trajectories import Told, TrajectoryCache

SHARED = [1, 2, 3, 4]


def filled(*trajectories: tuple[Origin, list[int]], most: int = 10_000) -> PatternCache:
    cache = PatternCache(most)
    for i, (origin, tokens) in enumerate(trajectories):
        cache.begin(f"r{i}", origin, tokens)
        cache.end(f"r{i}")
    return cache


def origin(name: str, group: str = "", task: str = "") -> Origin:
    return Origin(trajectory=name, group=group, task=task)


def draft(cache: PatternCache, context: list[int], whose: Origin, limit: int = 8) -> tuple[int, ...]:
    cache.begin("asks", whose, context)
    found = cache.draft("asks", limit)
    assert len(found.tokens) == len(found.paths)
    cache.end("asks")
    return found.tokens


def test_a_repeated_suffix_is_followed_and_never_past_the_limit():
    assert draft(filled(), [1, 2, 3, 4, 1, 2], origin("a")) == (3, 4, 1, 2)
    assert draft(filled(), [1, 2, 3, 4, 1, 2], origin("a"), limit=2) == (3, 4)
    assert draft(filled(), [1, 2, 3, 4, 1, 2], origin("a"), limit=0) == ()
    assert draft(filled(), [1], origin("a")) == draft(filled(), [], origin("b")) == ()


def test_the_group_is_asked_before_the_task_and_the_task_before_all():
    everyone = (origin("z"), [*SHARED, 30])
    task = (origin("y", "other", "task"), [*SHARED, 20])
    group = (origin("x", "group", "task"), [*SHARED, 10])
    asker = origin("a", "group", "task")
    assert draft(filled(group, task, everyone), SHARED, asker)[0] == 10
    assert draft(filled(task, everyone), SHARED, asker)[0] == 20
    assert draft(filled(everyone), SHARED, asker)[0] == 30


def test_what_many_others_said_since_after_the_same_opening_does_not_hide_kin():
    turn = [5, 6]  # opens every turn of everybody
    kin = (origin("x", "g", "task"), [1, 2, 3, *turn, 10])
    others = [(origin(f"o{i}", f"o{i}", f"t{i}"), [50 + i, *turn, 20]) for i in range(3 * PLACES)]
    asked = [1, 2, 3, *turn]
    assert draft(filled(kin, *others), asked, origin("a", "g", "task"))[0] == 10
    assert draft(filled(kin, *others), asked, origin("a", "g2", "task"))[0] == 10
    assert draft(filled(kin, *others), asked, origin("a"))[0] == 20


def test_a_much_longer_match_elsewhere_beats_a_short_one_of_kin():
    long = list(range(100, 112))
    cache = filled((origin("z"), [*long, 30]), (origin("x", "group"), [*long[-2:], 10]))
    assert draft(cache, long, origin("a", "group"))[0] == 30


def test_the_majority_is_followed_and_paths_only_become_less_likely():
    kin = [(origin(f"x{i}", "g"), [*SHARED, 7 if i % 3 else 9, 5, 6]) for i in range(9)]
    cache = filled(*kin)
    cache.begin("asks", origin("a", "g"), SHARED)
    found = cache.draft("asks", 8)
    assert found.tokens == (7, 5, 6)
    assert all(a >= b for a, b in zip((1.0, *found.paths), found.paths)) and found.paths[0] < 6 / 9


def test_a_running_sibling_is_drafted_from():
    cache = filled()
    cache.begin("sibling", origin("x", "g"), SHARED)
    cache.extend("sibling", [8])
    cache.extend("sibling", [9, 10])
    assert draft(cache, SHARED, origin("a", "g")) == (8, 9, 10)


def test_the_next_turn_continues_its_trajectory_and_adds_only_what_is_new():
    cache = filled((origin("a"), SHARED))
    cache.begin("turn 2", origin("a"), [*SHARED, 5, 6])
    assert cache.tokens == 6
    cache.end("turn 2")
    cache.begin("another", origin("a"), [9, 9, 9])  # the same name with another past: a trajectory of its own
    assert cache.tokens == 9


def test_the_oldest_ended_trajectories_go_first_and_running_ones_stay():
    cache = PatternCache(30)
    cache.begin("runs", origin("first"), range(1000, 1010))
    for i in range(20):
        cache.begin(f"r{i}", origin(f"t{i}"), range(10 * i, 10 * i + 10))
        cache.end(f"r{i}")
        assert cache.tokens <= 30
    assert draft(cache, [190, 191], origin("a"))[0] == 192
    assert draft(cache, [50, 51], origin("a")) == ()
    assert draft(cache, [1000, 1001], origin("a"))[0] == 1002


def test_memory_returns_to_nothing_when_everything_is_evicted():
    rng = random.Random(0)
    cache = PatternCache(0)
    for i in range(30):
        cache.begin(f"r{i}", origin(f"t{i % 7}"), [rng.randrange(5) for _ in range(rng.randrange(40))])
        cache.end(f"r{i}")
    assert cache.tokens == 0 and not cache._places and not cache._held and not cache._by_name


def test_a_cache_is_told_once_of_every_token_that_comes_and_of_every_trajectory_that_goes():
    class Noted(TrajectoryCache):
        def __init__(self, max_tokens: int) -> None:
            super().__init__(max_tokens)
            self.found: dict[int, list[int]] = {}

        def _added(self, told: Told, had: int) -> None:
            found = self.found.setdefault(told.serial, [])
            assert len(found) == had < len(told.tokens)
            found += told.tokens[had:]

        def _dropped(self, told: Told) -> None:
            assert not told.running and self.found.pop(told.serial) == told.tokens.tolist()

    rng, cache = random.Random(2), Noted(60)
    running: list[str] = []
    for i in range(300):
        if running and rng.random() < 0.5:
            cache.end(running.pop(rng.randrange(len(running))))
        else:
            name = f"t{rng.randrange(9)}"
            told = cache._by_name.get(name)
            goes_on = told.tokens.tolist() if told and rng.random() < 0.7 else []
            cache.begin(f"r{i}", origin(name), goes_on + [rng.randrange(5) for _ in range(rng.randrange(9))])
            cache.extend(f"r{i}", [7] * rng.randrange(3))
            running.append(f"r{i}")
        assert cache.tokens == sum(map(len, cache.found.values()))
        assert cache.tokens <= 60 or any(told.running for told in cache._held.values())
    for request in running:
        cache.end(request)
    assert cache.tokens <= 60 and set(cache.found) <= set(cache._held)


def test_a_draft_is_what_some_trajectory_had_after_the_same_two_tokens():
    rng = random.Random(1)
    for _ in range(50):
        told = [[rng.randrange(6) for _ in range(40)] for _ in range(5)]
        cache = filled(*((origin(f"t{i}", f"g{i % 2}"), tokens) for i, tokens in enumerate(told)))
        context = [rng.randrange(6) for _ in range(10)]
        found = draft(cache, context, origin("a", "g0"))
        wanted = [*context[-2:], *found]
        assert not found or any(
            wanted == t[i : i + len(wanted)] for t in [*told, context] for i in range(len(t) - len(wanted) + 1)
        )


def test_an_origin_is_read_from_what_sglang_passes_on():
    sent = {"trajectory": "u1/g2/t3", "group": "u1/g2", "task": "shell-7", "__req__": object()}
    assert read_origin(sent, "rid") == origin("u1/g2/t3", "u1/g2", "shell-7")
    assert read_origin(None, "rid") == read_origin({"other": 1}, "rid") == origin("rid")
