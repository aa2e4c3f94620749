"""Sum, count, least and greatest of numbers that come in parts: sums over sums, min of mins, maxima of maxima."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sum, count, least and greatest of some numbers; `+` joins two of them exactly."""

    sum: float = 0.0
    count: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        numbers = list(values)
        if not numbers:
            return cls()
        return cls(sum=math.fsum(numbers), count=len(numbers), minimum=min(numbers), maximum=max(numbers))

    def __add__(self, other: Summary) -> Summary:
        return Summary(
            sum=self.sum + other.sum,
            count=self.count + other.count,
            minimum=min(self.minimum, other.minimum),
            maximum=max(self.maximum, other.maximum),
        )

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.sum / self.count if self.count else 0.0
