"""Where a cell's time goes: busy, idle for want of work, idle because the cap on open groups blocks ready work.

Fed by the scheduler at every request for work and every answer, with the caller's clock (live or virtual); seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Idle(str, Enum):
    NO_WORK = "no_work"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTime:
    """Seconds of one cell since it first asked for work."""

    busy_s: float
    idle_s: float
    blocked_s: float


class CellClock:
    """Time of one cell."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._since: float | None = None
        self._idle: Idle | None = None
        self._busy_s = self._idle_s = self._blocked_s = 0.0

    def on_request(self, now: float) -> None:
        """The cell asks for work: an idle stretch ends."""
        if self._in_flight:
            return
        if self._since is not None and self._idle is not None:
            spent = now - self._since
            self._idle_s += spent if self._idle is Idle.NO_WORK else 0.0
            self._blocked_s += spent if self._idle is Idle.BLOCKED else 0.0
        self._since, self._idle = now, None

    def on_refusal(self, now: float, reason: Idle) -> None:
        if not self._in_flight:
            self._since, self._idle = now, reason

    def on_start(self) -> None:
        """The cell got an item, perhaps one to do after that in hand."""
        self._in_flight += 1

    def on_answer(self, now: float) -> None:
        """The cell finished an item."""
        if self._since is not None:
            self._busy_s += now - self._since
        self._since = now
        self._in_flight -= 1
        self._idle = None if self._in_flight else Idle.NO_WORK

    @property
    def time(self) -> CellTime:
        return CellTime(busy_s=self._busy_s, idle_s=self._idle_s, blocked_s=self._blocked_s)
