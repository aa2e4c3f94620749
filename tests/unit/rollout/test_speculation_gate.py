"""The gate on a virtual clock: it opens where drafting pays, and costs next to nothing where it does not."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

from megathunder.config.speculation import SpeculationConfig
from megathunder.speculation.costs import FEW, StepCosts
from megathunder.speculation.drafts import NOTHING, Draft
from megathunder.speculation.gate import Gate

MS = 1e-3


class Server:
    """`size` requests; a step costs a + b size, drafts c + d rows, a lookup `lookup` seconds; a drafted token comes
    true with probability `truth` (the cache says `claim`)."""

    def __init__(self, size, *, truth, claim=0.8, row=0.1 * MS, drafted=0.1 * MS, lookup=0.02 * MS, found=1.0, **knobs):
        self.now, self.emitted, self.rng = 0.0, 0, random.Random(0)
        self.size, self.truth, self.claim, self.found = size, truth, claim, found
        self.row, self.drafted, self.lookup = row, drafted, lookup
        self.gate = Gate(SpeculationConfig(**knobs), lambda: self.now)

    def draft(self) -> Draft:
        if self.rng.random() > self.found:
            return NOTHING
        return Draft((1,) * 7, tuple(self.claim ** (j + 1) for j in range(7)))

    def look_up(self, count: int) -> list[Draft]:
        self.now += count * self.lookup
        return [self.draft() for _ in range(count)]

    def true_tokens(self, limit: int) -> int:
        return next((j for j in range(limit) if self.rng.random() > self.truth), limit)

    def step(self) -> None:
        size, gate, drafts = self.size, self.gate, [NOTHING] * self.size
        if gate.asks(size):
            drafts = gate.choose(self.look_up(size), room=64 - size, spent_s=size * self.lookup)
        elif gate.may_peek(size):
            (peeked,) = self.look_up(1)
            gate.set_aside(self.lookup, peeking=True)
            gate.would_have(size, peeked, self.true_tokens(len(peeked.tokens)))
        gate.begin(size, drafts)
        rows = sum(len(d.tokens) for d in drafts)
        self.now += 2 * MS + 0.2 * MS * size + (self.drafted + self.row * rows if rows else 0.0)
        counts = [1 + self.true_tokens(len(d.tokens)) for d in drafts]
        gate.end(counts)
        self.emitted += sum(counts)

    def rate(self, steps: int = 1000) -> float:
        """Tokens a second over the next steps."""
        before = SimpleNamespace(now=self.now, emitted=self.emitted)
        for _ in range(steps):
            self.step()
        return (self.emitted - before.emitted) / (self.now - before.now)


def plain_rate(size: int) -> float:
    return size / (2 * MS + 0.2 * MS * size)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32])
def test_what_never_comes_true_costs_at_most_three_percent(size):
    assert Server(size, truth=0.0).rate() > 0.97 * plain_rate(size)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_is_never_found_costs_at_most_three_percent(size):
    assert Server(size, truth=0.0, found=0.0).rate() > 0.97 * plain_rate(size)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_what_repeats_keeps_the_gain_of_no_gate_within_ten_percent(size):
    gated, free = Server(size, truth=0.9), Server(size, truth=0.9, gate=False)
    assert gated.rate() > 0.9 * free.rate() > 1.4 * 0.9 * plain_rate(size)


def test_rows_that_cost_more_than_they_bring_are_not_drafted():
    costly = {"truth": 0.5, "row": 3 * MS, "drafted": 2 * MS}
    gated = Server(16, **costly)
    assert gated.rate() > 0.97 * plain_rate(16) > Server(16, gate=False, **costly).rate()


def test_a_false_claim_is_corrected_by_what_was_seen():
    server = Server(4, truth=0.1, claim=0.99, row=0.5 * MS)
    server.rate()
    assert server.gate.chance.of(0.99) < 0.3


def test_it_opens_when_load_begins_to_repeat_and_shuts_when_it_stops():
    server = Server(4, truth=0.0)
    server.rate()
    assert not server.gate.open
    server.truth = 0.95
    server.rate(2500)
    assert server.gate.open and server.rate() > 1.5 * plain_rate(4)
    server.truth = 0.0
    server.rate()
    assert not server.gate.open and server.rate() > 0.97 * plain_rate(4)


def test_no_more_rows_than_there_is_room_for():
    gate = Gate(SpeculationConfig(gate=False), lambda: 0.0)
    drafts = [Draft((1,) * 7, (0.9,) * 7)] * 5
    chosen = gate.choose(drafts, room=6, spent_s=0.0)
    assert sum(len(d.tokens) for d in chosen) == 6 and max(len(d.tokens) for d in chosen) == 2


def test_it_can_be_driven_from_outside_and_refuses_what_it_does_not_know():
    server = Server(2, truth=0.95)
    gate = server.gate
    assert not gate.control({"max_draft_tokens": 8}) and not gate.control({"colour": 1, "max_draft_tokens": 1})
    assert gate.control({"forget": 1}) and not gate.control({"forget": 2})
    assert gate.most == 7 and gate.control({"max_draft_tokens": 0})
    assert server.rate() == pytest.approx(plain_rate(2), rel=1e-6)
    assert gate.decisions.drafted_tokens == 0 and gate.report()["steps_shut"] == gate.decisions.steps
    assert gate.control({"max_draft_tokens": 7}) and server.rate() > 1.4 * plain_rate(2)


def test_drafts_after_prompts_are_looked_up_while_they_pay():
    server = Server(2, truth=0.95)
    gate = server.gate
    assert not gate.asks_after_prompts(1)
    server.rate()
    before = dataclasses.replace(gate.decisions)
    for _ in range(200):
        assert gate.asks_after_prompts(1)
        (draft,) = gate.choose_after_prompts(server.look_up(1), room=63, spent_s=server.lookup)
        gate.prompts_read([draft], [1 + server.true_tokens(len(draft.tokens))])
    assert gate.decisions.requests == before.requests + 200 and gate.decisions.steps == before.steps + 200
    assert gate.decisions.accepted_tokens > before.accepted_tokens + 400
    for _ in range(200):
        if gate.asks_after_prompts(1):
            (draft,) = gate.choose_after_prompts(server.look_up(1), room=63, spent_s=server.lookup)
            gate.prompts_read([draft], [1])
    assert not gate.asks_after_prompts(1) and not gate.open


def test_a_step_that_prompts_follow_is_timed_too():
    server = Server(2, truth=0.0)
    for _ in range(20):
        server.step()
        server.now += 1 * MS  # results, scheduling
    server.size = 5
    for _ in range(FEW):
        assert not server.gate.costs.knows(5)
        server.step()
        server.gate.interrupted()
        server.now += 100 * MS  # the prompts
    assert server.gate.costs.knows(5)
    assert server.gate.costs.plain(5) == pytest.approx(2 * MS + 1 * MS + 1 * MS, rel=0.05)


def test_counts_add_up():
    server = Server(3, truth=0.7)
    server.rate(300)
    counted = server.gate.decisions
    assert counted.emitted_tokens == counted.requests + counted.accepted_tokens == server.emitted
    assert counted.accepted_tokens <= counted.drafted_tokens and counted.steps == 300 and counted.requests == 900


def test_costs_are_learnt_from_steps():
    costs = StepCosts()
    assert costs.plain(4) == 0.0
    for _ in range(FEW):
        assert not costs.knows(2)
        costs.saw_plain(2, 2 * MS)
    assert costs.knows(2) and not costs.knows(5)
    for _ in range(200):
        costs.saw_plain(2, 2 * MS)
        costs.saw_plain(8, 5 * MS)
        for rows in (2, 5, 12):
            costs.saw_drafted(8, rows, 5 * MS + 1 * MS + 0.3 * MS * rows)
    assert costs.knows(5) and costs.knows(16) and not costs.knows(17)
    assert costs.plain(8) == pytest.approx(5 * MS) and costs.plain(5) == pytest.approx(3.5 * MS)
    assert costs.excess(8, 10) == pytest.approx(4 * MS, rel=0.02)
    costs.saw_plain(8, 500 * MS)  # a pause of the machine
    assert costs.plain(8) == pytest.approx(5 * MS)
