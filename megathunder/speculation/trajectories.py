"""What both suffix caches keep of trajectories: their tokens, which requests append to them, and when they go.

    begin(request, origin, context)   goes on with the trajectory of that name if `context` continues it, else a new one
    end(request)                      trajectories that no request appends to go, oldest first, beyond `max_tokens`

A cache adds how tokens are found again: `_added`, `_dropped` and `draft`. Base of `patterns.py` and `arctic.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from megathunder.speculation.origin import Origin

TOKEN = "q"  # array's code of a token, SGLang's for those of a request: an array takes no other's


@dataclass(slots=True, eq=False)
class Told:
    """One trajectory's tokens. `serial` rises with age; `running` counts the requests that append to it."""

    serial: int
    origin: Origin
    tokens: array = field(default_factory=lambda: array(TOKEN))
    running: int = 0


class TrajectoryCache(ABC):
    """`SuffixCache` without the drafts."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._held: dict[int, Told] = {}  # by serial, oldest first
        self._by_name: dict[str, Told] = {}
        self._requests: dict[str, Told] = {}
        self._serial = 0
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def begin(self, request: str, origin: Origin, context: Sequence[int]) -> None:
        context = array(TOKEN, context)
        known = self._by_name.get(origin.trajectory)
        if known is None or known.running or context[: len(known.tokens)] != known.tokens:
            self._serial += 1
            known = self._held[self._serial] = self._by_name[origin.trajectory] = Told(self._serial, origin)
        known.running += 1
        self._requests[request] = known
        self._append(known, context[len(known.tokens) :])

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        self._append(self._requests[request], tokens)

    def end(self, request: str) -> None:
        self._requests.pop(request).running -= 1
        while self._tokens > self._max_tokens:
            oldest = next((told for told in self._held.values() if not told.running), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _append(self, told: Told, tokens: Sequence[int]) -> None:
        had = len(told.tokens)
        told.tokens.extend(tokens)
        self._tokens += len(told.tokens) - had
        if len(told.tokens) > had:
            self._added(told, had)

    def _drop(self, told: Told) -> None:
        del self._held[told.serial]
        self._tokens -= len(told.tokens)
        if self._by_name.get(told.origin.trajectory) is told:
            del self._by_name[told.origin.trajectory]
        if told.tokens:
            self._dropped(told)

    @abstractmethod
    def _added(self, told: Told, had: int) -> None:
        """`told` has tokens[had:] more: find them from now on."""

    @abstractmethod
    def _dropped(self, told: Told) -> None:
        """`told` is no longer held: forget where its tokens were."""
