"""Keeps the suffix cache in step with the requests that decode, and drafts for them. Called by `worker.py`.

    propose(requests) -> a draft each          before a step: feeds what the last one emitted, then asks cache and gate
    propose_after_prompts(requests)            the same of requests whose prompts are about to be read
    finished(rid)                              feeds the last tokens; the trajectory stays in the cache

No draft reaches past a stop token, a request's token budget, the model's context, the request's cache slots or the rows
a step may have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megathunder.speculation.drafts import NOTHING, Draft, SuffixCache
from megathunder.speculation.gate import Gate
from megathunder.speculation.origin import read_origin

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

FEED_EVERY = 8  # steps, while the gate is shut
FORGOTTEN_AFTER = 4  # times the most requests seen at once: those that ended without a word


class Peek(NamedTuple):
    """A draft that is not used: of `request` with `start` sampled tokens, in a step of `size` requests."""

    request: Req
    draft: Draft
    start: int
    size: int


class Drafter:
    """`max_draft` tokens a request, `max_rows` rows a step, `context_tokens` positions the model has."""

    def __init__(
        self,
        cache: SuffixCache,
        gate: Gate,
        *,
        max_draft: int,
        max_rows: int,
        context_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self.gate, self._clock = cache, gate, clock
        self._max_draft, self._max_rows, self._context_tokens = max_draft, max_rows, context_tokens
        self._fed: dict[str, tuple[Req, int]] = {}  # request and how many of its sampled tokens the cache has
        self._peek: Peek | None = None
        self._step = 0

    @property
    def cached_tokens(self) -> int:
        return self._cache.tokens

    def propose(self, requests: Sequence[Req]) -> list[Draft]:
        """A draft for each of `requests`, which are about to decode; all empty when the gate is shut."""
        size = len(requests)
        self._step += 1
        if not self.gate.asks(size):
            self._while_shut(requests)
            return [NOTHING] * size
        drafts, spent_s = self._look_up(requests, _slots)
        return self.gate.choose(drafts, room=self._max_rows - size, spent_s=spent_s)

    def propose_after_prompts(self, requests: Sequence[Req]) -> list[Draft]:
        """A draft for each of `requests`, whose cache slots are still to be allocated. The gate says whether to ask."""
        drafts, spent_s = self._look_up(requests, lambda _: self._max_draft)
        return self.gate.choose_after_prompts(drafts, room=self._max_rows - len(requests), spent_s=spent_s)

    def _look_up(self, requests: Sequence[Req], slots: Callable[[Req], int]) -> tuple[list[Draft], float]:
        """What the cache has, and the seconds it took; `slots` are those a request's draft may fill."""
        started_s = self._clock()
        for request in requests:
            self._feed(request)
        drafts = [self._draft(request, slots(request)) for request in requests]
        return drafts, self._clock() - started_s

    def _while_shut(self, requests: Sequence[Req]) -> None:
        """Feed the cache now and then, and learn from one peek at a time whether drafting would pay."""
        if self._step % FEED_EVERY == 0 or any(request.rid not in self._fed for request in requests):
            started_s = self._clock()
            for request in requests:
                self._feed(request)
            self.gate.set_aside(self._clock() - started_s)
        allowed, peek = self.gate.may_peek(len(requests)), self._peek
        if allowed if peek is None else len(peek.request.output_ids) >= peek.start + len(peek.draft.tokens):
            started_s = self._clock()
            if peek is None:
                self._look(requests)
            else:
                self._compare()
            self.gate.set_aside(self._clock() - started_s, peeking=True)

    def _look(self, requests: Sequence[Req]) -> None:
        request = requests[self._step % len(requests)]
        self._feed(request)
        draft = self._draft(request, _slots(request))
        self._peek = Peek(request, draft, len(request.output_ids), len(requests))

    def _compare(self) -> None:
        """What the peek drafted, beside what was then sampled."""
        request, draft, start, size = self._peek
        self._peek = None
        sampled = request.output_ids[start : start + len(draft.tokens)]
        agreed = next((j for j, (a, b) in enumerate(zip(draft.tokens, sampled)) if a != b), len(sampled))
        self.gate.would_have(size, draft, agreed)

    def forget(self, cache: SuffixCache) -> None:
        """Go on with `cache`, which is empty: nothing of earlier trajectories is left. Requests that run begin anew."""
        self._cache, self._peek = cache, None
        self._fed.clear()

    def finished(self, rid: str) -> None:
        """SGLang is done with the request; its output may reach past the end, up to which it is kept."""
        request, fed = self._fed.pop(rid, (None, 0))
        if self._peek is not None and self._peek.request.rid == rid:
            self._compare()
        if request is not None:
            kept = request.output_ids[fed : request.finished_len]
            self._cache.extend(rid, kept)
            self._cache.end(rid)

    def _feed(self, request: Req) -> None:
        known, output = self._fed.get(request.rid), request.output_ids
        if known is None or known[0] is not request:
            if known is not None:
                self._cache.end(request.rid)
            origin = read_origin(request.sampling_params.custom_params, request.rid)
            self._cache.begin(request.rid, origin, request.origin_input_ids + output)
        elif len(output) > known[1]:
            self._cache.extend(request.rid, output[known[1] :])
        self._fed[request.rid] = (request, len(output))
        self._forget()

    def _forget(self) -> None:
        while len(self._fed) > FORGOTTEN_AFTER * self._max_rows:
            rid = next(iter(self._fed))
            del self._fed[rid]
            self._cache.end(rid)

    def _draft(self, request: Req, slots: int) -> Draft:
        """What may follow, up to where the request would stop: after that nothing is sampled."""
        draft = self._cache.draft(request.rid, self._limit(request, slots))
        stops = request.sampling_params.stop_token_ids or ()
        end = next((j for j, token in enumerate(draft.tokens) if token in stops), None)
        return draft if end is None else Draft(draft.tokens[:end], draft.paths[:end])

    def _limit(self, request: Req, slots: int) -> int:
        budget = request.sampling_params.max_new_tokens - len(request.output_ids) - 1
        room = self._context_tokens - len(request.origin_input_ids) - len(request.output_ids)
        return min(self._max_draft, budget, room, slots)


def _slots(request: Req) -> int:
    return request.kv.kv_allocated_len - request.kv.kv_committed_len - 1
