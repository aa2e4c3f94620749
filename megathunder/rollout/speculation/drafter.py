"""Keeps the suffix cache in step with the requests that decode, and drafts for them. Called by `worker.py`.

    propose(requests) -> a draft each          before a step: feeds what the last one emitted, then asks cache and gate
    finished(rid)                              feeds the last tokens; the trajectory stays in the cache

No draft reaches past a request's token budget, the model's context, the request's cache slots or the rows a step may
have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megathunder.rollout.speculation.drafts import NOTHING, Draft, SuffixCache
from megathunder.rollout.speculation.gate import Gate
from megathunder.rollout.speculation.origin import read_origin

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

FORGOTTEN_AFTER = 4  # times the most requests seen at once: those that ended without a word


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
        self._peeks: dict[str, tuple[Draft, int, int]] = {}  # draft, sampled tokens then, requests then
        self._turn = 0

    @property
    def cached_tokens(self) -> int:
        return self._cache.tokens

    def propose(self, requests: Sequence[Req]) -> list[Draft]:
        """A draft for each of `requests`, which are about to decode; all empty when the gate is shut."""
        for request in requests:
            self._feed(request)
        self._forget(len(requests))
        size = len(requests)
        self._settle(requests)
        if not self.gate.asks(size):
            if self.gate.may_peek(size):
                self._peek(requests)
            return [NOTHING] * size
        started_s = self._clock()
        drafts = [self._cache.draft(request.rid, self._limit(request)) for request in requests]
        return self.gate.choose(drafts, room=self._max_rows - size, spent_s=self._clock() - started_s)

    def _peek(self, requests: Sequence[Req]) -> None:
        """Draft for one request without using it."""
        self._turn += 1
        request = requests[self._turn % len(requests)]
        if request.rid not in self._peeks:
            started_s = self._clock()
            draft = self._cache.draft(request.rid, self._limit(request))
            self.gate.peeked(self._clock() - started_s)
            self._peeks[request.rid] = (draft, len(request.output_ids), len(requests))

    def _settle(self, requests: Sequence[Req]) -> None:
        """Compare peeks with what was sampled since."""
        for request in requests if self._peeks else ():
            peek = self._peeks.get(request.rid)
            if peek is not None and len(request.output_ids) >= peek[1] + len(peek[0].tokens):
                self._compare(request, self._peeks.pop(request.rid))

    def _compare(self, request: Req, peek: tuple[Draft, int, int]) -> None:
        draft, start, size = peek
        sampled = request.output_ids[start : start + len(draft.tokens)]
        agreed = next((j for j, (a, b) in enumerate(zip(draft.tokens, sampled)) if a != b), len(sampled))
        self.gate.would_have(size, draft, agreed)

    def finished(self, rid: str) -> None:
        """SGLang is done with the request; its output may reach past the end, up to which it is kept."""
        request, fed = self._fed.pop(rid, (None, 0))
        peek = self._peeks.pop(rid, None)
        if request is not None:
            if peek is not None:
                self._compare(request, peek)
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

    def _forget(self, running: int) -> None:
        while len(self._fed) > FORGOTTEN_AFTER * max(running, self._max_rows):
            rid = next(iter(self._fed))
            del self._fed[rid]
            self._peeks.pop(rid, None)
            self._cache.end(rid)

    def _limit(self, request: Req) -> int:
        budget = request.sampling_params.max_new_tokens - len(request.output_ids) - 1
        room = self._context_tokens - len(request.origin_input_ids) - len(request.output_ids)
        slots = request.kv.kv_allocated_len - request.kv.kv_committed_len - 1
        return min(self._max_draft, budget, room, slots)
