"""Which ready chains share a micro-batch: same target, same kind of pass, tokens and rows within the limits.

Greedy in order of readiness, so the result is a function of the event order alone. A row longer than the limit runs
alone. Called by the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """Tokens and rows of one micro-batch."""

    tokens: int
    rows: int


def pack(first: T, others: Iterable[T], limits: PackLimits, size: Callable[[T], int]) -> list[T]:
    """`first` and as many of `others`, in order, as fit beside it; what does not fit is passed over."""
    chosen, used = [first], size(first)
    for item in others:
        if len(chosen) >= limits.rows or used >= limits.tokens:
            break
        if item is not first and used + size(item) <= limits.tokens:
            chosen.append(item)
            used += size(item)
    return chosen
