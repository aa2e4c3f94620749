"""Chooses between full weights and changes by measuring both on the run itself.

    publication 1   full weights (nothing else is possible): its seconds and bytes
    publication 2   the change: its seconds and bytes; then the faster of the two for the rest of the run

Says what it chose and why. Called by `publisher.py` for transport = "auto".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Transport, Weights
from megathunder.types import ServerAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One publication."""

    seconds: float
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.payload_bytes / 1e6:.2f} MB in {self.seconds:.2f} s"


class AutomaticTransport:
    """`delta` sends `full` by itself where a server has no base; `say` receives one line."""

    def __init__(self, full: Transport, delta: Transport, say: Callable[[str], None]) -> None:
        self._full, self._delta, self._say = full, delta, say
        self._first: Measured | None = None
        self._chosen: Transport | None = None

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        started = time.monotonic()
        sent = (self._chosen or self._delta).send(round, servers, version, weights)
        measured = Measured(seconds=time.monotonic() - started, payload_bytes=sent)
        if self._chosen is None and round.live(servers):
            self._judge(measured)
            if self._chosen is self._full:
                self._delta = self._full  # its copy of the weights goes
        return sent

    def _judge(self, measured: Measured) -> None:
        if self._first is None:
            self._first = measured
        elif measured.payload_bytes < self._first.payload_bytes:
            faster = measured.seconds < self._first.seconds
            self._chosen = self._delta if faster else self._full
            name = "changes (delta)" if faster else "full weights"
            self._say(f"publish.transport = auto: full weights {self._first}, changes {measured}; from now on {name}")
        else:
            self._chosen = self._full
            self._say(
                f"publish.transport = auto: full weights: changes ({measured}) are no smaller than they ({self._first})"
            )
