"""What a transport is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from megathunder.publish.publish_session import PublishSession
from megathunder.types import ServerAddress

Weights = Iterable[tuple[str, Tensor]]  # (engine-independent name, full tensor), in one order every time


class Transport(Protocol):
    """Sends full weights or changes."""

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """Have every live server of `servers` hold `weights` as `version`, acknowledged; others are in `round.failed`.

        Exhausts `weights` whatever happens to the servers, since other ranks take part in producing them. Returns the
        bytes sent to each server."""
        ...
