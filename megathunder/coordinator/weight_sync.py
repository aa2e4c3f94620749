"""A policy version reaches the servers: sent, asked back, sent again to those that lack it, until enough hold it.

A server that dies meanwhile is restarted by its pool and gets the weights there (`Coordinator.republish`); one that
lives and did not take them is sent them again, and restarted where that does not help: a server of another version
never samples. A publication counts when it was acknowledged and the servers say so themselves.
Raises InfrastructureFailure when fewer than `publish.min_servers` hold the version within the limit, or are left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from megathunder.coordinator.assembly import Parts
from megathunder.errors import InfrastructureFailure
from megathunder.types import Done, Publish, ServerAddress

log = logging.getLogger(__name__)

Send = Callable[[tuple[ServerAddress, ...]], Awaitable[tuple[Publish, Done]]]
AGAIN_S = 0.5
ATTEMPTS = 2  # for servers that can be done without


async def sync_weights(parts: Parts, version: int, send: Send) -> list[tuple[Publish, Done]]:
    """Every ready server holds `version`; at least `publish.min_servers` of them. The publications that it took."""
    limit_s = parts.config.rollout.startup_timeout_s + 2 * parts.config.publish.timeout_s
    deadline, needed = time.monotonic() + limit_s, parts.config.publish.min_servers
    sent: list[tuple[Publish, Done]] = []
    lacking, held, failed = parts.servers.ready, {}, set()
    while True:
        if lacking:
            sent.append(await send(lacking))
            failed = {server for server in lacking if server.name in sent[-1][1].stats.failed_servers}
            for server in failed:
                parts.servers.probe_now(server)
        held = await server_versions(parts, parts.servers.ready)
        lacking = tuple(server for server, holds in held.items() if holds != version or server in failed)
        enough = len(held) - len(lacking) >= needed
        if enough and (not lacking or len(sent) >= ATTEMPTS):
            for server in lacking:
                parts.servers.mark_unhealthy(
                    server, f"it did not acknowledge version {version}, and holds {held[server]}"
                )
            return sent
        if len(parts.servers.servers) < needed or time.monotonic() > deadline:
            break
        await asyncio.sleep(AGAIN_S)
    if not parts.servers.servers:
        raise InfrastructureFailure("every rollout server is lost (rollout.max_restarts); see logs/ of the run")
    states = ", ".join(f"{server.name} holds {holds}" for server, holds in held.items()) or "none is ready"
    left = len(parts.servers.servers)
    until = f"{left} left" if left < needed else f"within {limit_s:.0f} s"
    raise InfrastructureFailure(
        f"version {version} did not reach {needed} server(s) (publish.min_servers), {until}: {states}; logs/ say why"
    )


async def server_versions(parts: Parts, servers: Iterable[ServerAddress]) -> dict[ServerAddress, int]:
    """What each server says it holds; -1 for one that was never given a version, or does not answer."""
    servers = tuple(servers)

    async def ask(server: ServerAddress) -> int:
        try:
            return await control.version(server)
        except InfrastructureFailure as failure:
            log.warning("%s", failure)
            parts.servers.probe_now(server)
            return -1

    async with parts.control() as control:
        return dict(zip(servers, await asyncio.gather(*map(ask, servers)), strict=True))
