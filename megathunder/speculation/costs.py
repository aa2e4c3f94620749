"""What a decode step costs: learned from steps, in seconds of the scheduler's own clock.

    plain(b)       b requests, no drafts: a moving mean for each b; between known sizes a line
    excess(r)      what r drafted rows add: c0 + c1 r

Called by `gate.py`. Pure arithmetic; whoever calls measures.
"""

from __future__ import annotations

import bisect

MEAN_RATE = 0.1  # of a new value in a moving mean, once there are ten
OUTLIER = 5.0  # times the mean: a pause of the machine, not a step
LINE_RATE = 0.1
TYPICAL_ROWS = 8.0
FEW = 4  # plain steps after which the cost of a size is known
DOUBT = 0.98


class StepCosts:
    """Costs of one server's steps."""

    def __init__(self) -> None:
        self._plain: dict[int, tuple[float, int]] = {}  # size -> mean, how many
        self._sizes: list[int] = []
        self._known: tuple[int, int] | None = None  # the smallest size and the largest that were seen a few times
        self._excess: Line | None = None

    def saw_plain(self, size: int, seconds: float) -> None:
        mean, count = self._plain.get(size, (seconds, 0))
        if count == 0:
            bisect.insort(self._sizes, size)
        elif seconds > OUTLIER * mean and count > 3:
            return
        rate = max(MEAN_RATE, 1 / (count + 1))
        self._plain[size] = (mean + rate * (seconds - mean), count + 1)
        if count + 1 == FEW:
            least, most = self._known or (size, size)
            self._known = min(least, size), max(most, size)

    def saw_drafted(self, size: int, rows: int, seconds: float) -> None:
        plain = self.plain(size)
        if plain and seconds < OUTLIER * (plain + self.excess(size, rows)):
            if self._excess is None:
                self._excess = Line(*self._guess(size))
            self._excess.saw(rows, seconds - plain)

    def knows(self, size: int) -> bool:
        """Whether sizes that were seen a few times without drafts reach to within a factor of two of this one."""
        return self._known is not None and self._known[0] <= 2 * size and size <= 2 * self._known[1]

    def plain(self, size: int) -> float:
        """Seconds of a step of `size` requests without drafts; 0 when no step was seen."""
        if not self._sizes:
            return 0.0
        if size in self._plain:
            return self._plain[size][0]
        right = bisect.bisect(self._sizes, size)
        if right == 0 or right == len(self._sizes):
            near = self._sizes[0 if right == 0 else -1]
            return self._plain[near][0] * (1 + size / near) / 2  # between constant and proportional
        a, b = self._sizes[right - 1], self._sizes[right]
        low, high = self._plain[a][0], self._plain[b][0]
        return low + (high - low) * (size - a) / (b - a)

    def excess(self, size: int, rows: int) -> float:
        """Seconds that `rows` drafted rows add to a step of `size` requests."""
        base, slope = (self._excess.base, self._excess.slope) if self._excess else self._guess(size)
        return max(0.0, base + slope * rows)

    def _guess(self, size: int) -> tuple[float, float]:
        """Base and slope before any is measured. Hopeful, so that it is tried; a row costs the same at any size."""
        return 0.05 * self.plain(size), 0.05 * self.plain(self._sizes[0] if self._sizes else size)

    def doubt(self) -> None:
        """Nothing was drafted for a while: believe a little less that it is dear, so that it is tried again."""
        if self._excess is not None:
            self._excess.base *= DOUBT
            self._excess.slope *= DOUBT


class Line:
    """y = base + slope x, moved a part of the way to each point (normalised least mean squares): never far off, even
    where x hardly varies."""

    def __init__(self, base: float, slope: float) -> None:
        self.base, self.slope = base, slope

    def saw(self, x: float, y: float) -> None:
        step = LINE_RATE * (y - self.base - self.slope * x) / (TYPICAL_ROWS**2 + x * x)
        self.base = max(0.0, self.base + step * TYPICAL_ROWS**2)
        self.slope = max(0.0, self.slope + step * x)
