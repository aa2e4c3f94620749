"""Speculation beside a run: the load controller's task, and what each update's row says of it.

    between two rows, summed over the servers      accept length = emitted tokens / decoding requests, summed over steps

A server that does not answer is left out of a row; one that was restarted counts from zero. Called by the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from megathunder import background
from megathunder.config.speculation import SpeculationConfig
from megathunder.coordinator.load_controller import LoadController
from megathunder.coordinator.supply import Servers
from megathunder.errors import InfrastructureFailure
from megathunder.metrics.row import MetricsRow
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.protocol import SpeculationCounts
from megathunder.types import ServerAddress

COUNTED = ("steps", "steps_drafted", "requests", "drafted_tokens", "accepted_tokens", "emitted_tokens")
ASK_S = 10.0


class Drafting:
    """Make one with `drafting`."""

    def __init__(self, control: ServerControl, servers: Servers) -> None:
        self._control, self._servers = control, servers
        self._before: dict[tuple[str, int], SpeculationCounts] = {}

    async def filled(self, row: MetricsRow) -> MetricsRow:
        """`row` with what the servers drafted since the last one."""
        changes = await asyncio.gather(*(self._since_before(server) for server in self._servers.ready))
        total = {name: sum(change[name] for change in changes if change) for name in COUNTED}
        if not total["steps"]:
            return row
        return msgspec.structs.replace(
            row,
            speculation_accept_length=total["emitted_tokens"] / total["requests"],
            speculation_drafted_tokens=total["drafted_tokens"],
            speculation_accepted_tokens=total["accepted_tokens"],
            speculation_off_share=1 - total["steps_drafted"] / total["steps"],
        )

    async def _since_before(self, server: ServerAddress) -> dict[str, int] | None:
        try:
            now = await self._control.speculation(server)
        except InfrastructureFailure:
            return None
        key = (server.name, server.incarnation)
        before, self._before[key] = self._before.get(key), now
        if now is None:
            return None
        return {name: getattr(now, name) - (getattr(before, name) if before else 0) for name in COUNTED}


@contextlib.asynccontextmanager
async def drafting(
    settings: SpeculationConfig | None, servers: Servers, api_key: str
) -> AsyncIterator[Drafting | None]:
    """The servers' speculation, its regime following their load, until the block ends; None where they do not draft."""
    if settings is None:
        yield None
        return
    async with ServerControl(timeout_s=ASK_S, api_key=api_key) as control:
        controller = LoadController(settings, control, lambda: servers.ready)
        watching = background.start(controller.watch(), "the load controller of speculation")
        try:
            yield Drafting(control, servers)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
