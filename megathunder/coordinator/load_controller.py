"""Switches each server between low load (it drafts) and high load (it does not), from the load the servers report.

    LOW  -> HIGH   when requests (running and waiting) >= high_load_requests, AGREE answers in a row
    HIGH -> LOW    when requests <= low_load_requests, AGREE answers in a row
    in between, and while a server does not answer: as it is
    any  -> off    while `switch(on=False)` holds, for servers that come back meanwhile too; then as its regime says

`Regimes` decides, in plain Python on what it is told; `watch` asks `/v1/loads` and tells servers, beside the requests:
nothing waits for it, and a server that cannot be told goes on as it is (its own gate still guards it).
Called by the coordinator; placement may ask `regime`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from megathunder import tracing
from megathunder.config.speculation import SpeculationConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.control import ServerControl
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)
AGREE = 2  # answers in a row before a switch


class Regime(Enum):
    """What a server has to do well now."""

    LOW = "low"
    HIGH = "high"


@dataclass(slots=True)
class Seen:
    """One server: its regime, and how many answers in a row asked for the other one."""

    regime: Regime = Regime.LOW
    against: int = 0


class Regimes:
    """The regime of every server, by name and incarnation (a server that was restarted begins anew)."""

    def __init__(self, settings: SpeculationConfig) -> None:
        self._settings = settings
        self._seen: dict[tuple[str, int], Seen] = {}

    def regime(self, server: ServerAddress) -> Regime:
        """The regime now; LOW for a server that never reported."""
        return self._seen.get((server.name, server.incarnation), Seen()).regime

    def saw(self, server: ServerAddress, requests: int) -> Regime | None:
        """`server` has `requests` running and waiting. The regime it is to enter (`entered` once it was told), None
        where it stays."""
        seen = self._seen.setdefault((server.name, server.incarnation), Seen())
        if seen.regime is Regime.LOW:
            other = Regime.HIGH if requests >= self._settings.high_load_requests else None
        else:
            other = Regime.LOW if requests <= self._settings.low_load_requests else None
        seen.against = seen.against + 1 if other else 0
        return other if seen.against >= AGREE else None

    def entered(self, server: ServerAddress, regime: Regime) -> None:
        """The server was told."""
        self._seen[server.name, server.incarnation] = Seen(regime)


class LoadController:
    """Keeps the servers in the regimes that `Regimes` decides."""

    def __init__(
        self, settings: SpeculationConfig, control: ServerControl, ready: Callable[[], Iterable[ServerAddress]]
    ) -> None:
        self._settings, self._control, self._ready = settings, control, ready
        self.regimes = Regimes(settings)
        self._limits: dict[tuple[str, int], int] = {}  # last told; a server begins with the most

    async def watch(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Until cancelled: every `load_every_s`, ask each ready server and tell it what changes."""
        while True:
            await asyncio.gather(*(self.attend(server) for server in self._ready()))
            await sleep(self._settings.load_every_s)

    async def attend(self, server: ServerAddress) -> None:
        """One server once."""
        try:
            wished = self.regimes.saw(server, await self._control.requests(server))
            low = (wished or self.regimes.regime(server)) is Regime.LOW
            await self._limit(server, self._settings.max_draft_tokens if low else 0)
            if wished is not None:
                self.regimes.entered(server, wished)
                tracing.mark(server.name, f"{wished.value} load")
        except InfrastructureFailure as failure:
            log.debug("load of %s: %s", server.name, failure)

    async def _limit(self, server: ServerAddress, tokens: int) -> None:
        """It drafts at most `tokens` from now on; says nothing that it was told before."""
        key = (server.name, server.incarnation)
        if self._limits.get(key, self._settings.max_draft_tokens) != tokens:
            await self._control.set_state(server, {"speculation_max_draft_tokens": tokens})
            self._limits[key] = tokens
