"""The drafter keeps the cache in step with requests as SGLang has them, and never drafts past a limit."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from megathunder.config.speculation import SpeculationConfig
from megathunder.speculation.drafter import FORGOTTEN_AFTER, Drafter
from megathunder.speculation.gate import Gate
from megathunder.speculation.patterns import PatternCache

LONG = list(range(100, 140))


def request(
    rid: str, prompt: list[int], output: list[int], *, most: int = 100, slots: int = 8, stops: tuple[int, ...] = ()
) -> SimpleNamespace:
    """What the drafter reads of SGLang's request."""
    committed = len(prompt) + len(output) - 1
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        finished_len=None,
        sampling_params=SimpleNamespace(
            max_new_tokens=most, custom_params={"trajectory": rid, "group": "g"}, stop_token_ids=set(stops) or None
        ),
        kv=SimpleNamespace(kv_allocated_len=committed + slots, kv_committed_len=committed),
    )


def drafter(*, gate: bool = False, context: int = 1000, rows: int = 64) -> Drafter:
    made = Gate(SpeculationConfig(gate=gate), lambda: 0.0)
    cache = PatternCache(10_000)
    return Drafter(cache, made, max_draft=7, max_rows=rows, context_tokens=context, clock=lambda: 0.0)


def drafted(made: Drafter, *requests: SimpleNamespace) -> list[tuple[int, ...]]:
    return [draft.tokens for draft in made.propose(requests)]


def told(made: Drafter, tokens: list[int]) -> None:
    """A sibling that ended."""
    sibling = request("sibling", tokens[:2], tokens[2:])
    made.propose([sibling])
    made.finished("sibling")


def test_a_draft_ends_before_the_budget_the_context_and_the_cache_slots_do():
    made = drafter()
    told(made, LONG)
    assert drafted(made, request("a", LONG[:3], LONG[3:5])) == [tuple(LONG[5:12])]
    assert drafted(made, request("b", LONG[:3], LONG[3:5], most=5)) == [tuple(LONG[5:7])]  # two, and one sampled
    assert drafted(made, request("c", LONG[:3], LONG[3:5], most=3)) == [()]
    assert drafted(made, request("d", LONG[:3], LONG[3:5], slots=4)) == [tuple(LONG[5:8])]
    short = drafter(context=8)
    told(short, LONG[:12])
    assert drafted(short, request("a", LONG[:3], LONG[3:5])) == [tuple(LONG[5:8])]


def test_nothing_is_drafted_after_what_would_end_the_request():
    made = drafter()
    told(made, LONG)
    assert drafted(made, request("a", LONG[:3], LONG[3:5], stops=(LONG[8], 0))) == [tuple(LONG[5:8])]
    assert drafted(made, request("b", LONG[:3], LONG[3:5], stops=(LONG[5],))) == [()]


def test_a_step_has_at_most_as_many_rows_as_there_is_room_for():
    made = drafter(rows=6)
    told(made, LONG)
    found = drafted(made, *(request(f"r{i}", LONG[:3], LONG[3:5]) for i in range(4)))
    assert sum(map(len, found)) == 2


def test_what_was_kept_past_the_end_of_an_output_is_not_remembered():
    made = drafter()
    ended = request("a", LONG[:2], LONG[2:10])
    made.propose([ended])
    ended.output_ids.extend(LONG[10:16])
    ended.finished_len = 10
    made.finished("a")
    assert made.cached_tokens == 12
    made.finished("a")  # twice is once
    assert drafted(made, request("b", [1], LONG[8:10])) == [(LONG[10], LONG[11])]


def test_a_request_that_ends_while_the_gate_is_shut_is_remembered_whole():
    made = drafter(gate=True)
    short = request("a", LONG[:4], LONG[4:5])
    for token in LONG[5:8]:
        assert drafted(made, short) == [()]
        short.output_ids.append(token)
    made.finished("a")
    assert made.cached_tokens == 8


def test_requests_that_vanish_without_a_word_are_forgotten():
    made = drafter(rows=2)
    for i in range(40):
        made.propose([request(f"r{i}", [i, i + 1], [i + 2])])
    assert len(made._fed) <= FORGOTTEN_AFTER * 2
    made.finished("r0")


def test_a_peek_is_compared_with_what_was_sampled_and_opens_the_gate():
    made = drafter(gate=True)
    told(made, LONG)
    made.gate.costs.saw_plain(1, 1.0)
    asks = request("a", LONG[:3], LONG[3:5])
    for token in LONG[5:30]:
        made.propose([asks])
        asks.output_ids.append(token)
    assert made.gate.decisions.peeks and made.gate.open


def test_nothing_of_earlier_trajectories_is_left_after_forgetting_and_running_requests_go_on():
    made = drafter()
    told(made, LONG)
    running = request("a", LONG[:3], LONG[3:5])
    assert drafted(made, running) == [tuple(LONG[5:12])]
    made.forget(PatternCache(10_000))
    assert made.cached_tokens == 0
    running.output_ids.append(LONG[5])
    assert drafted(made, running) == [()]
    made.finished("a")
    assert made.cached_tokens == 6
