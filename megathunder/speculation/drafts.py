"""What a suffix cache answers, and the interface both caches have (`patterns.py` here, `arctic.py` a library's).

begin(request, origin, context) -> extend(request, tokens) ... draft(request, limit) ... -> end(request)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from megathunder.speculation.origin import Origin


class Draft(NamedTuple):
    """Tokens guessed to come next. `paths[j]` estimates the probability that tokens[: j + 1] all come true."""

    tokens: tuple[int, ...]
    paths: tuple[float, ...]


NOTHING = Draft((), ())


class SuffixCache(Protocol):
    """Trajectories seen so far, ended and running, and guesses from them."""

    def begin(self, request: str, origin: Origin, context: Sequence[int]) -> None:
        """A request of `origin` starts; `context` is all its tokens so far, its trajectory's earlier turns included."""

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        """`tokens` followed."""

    def draft(self, request: str, limit: int) -> Draft:
        """At most `limit` tokens that may follow what `request` has so far."""

    def end(self, request: str) -> None:
        """The request is over; its tokens stay."""

    @property
    def tokens(self) -> int:
        """Tokens held."""
