"""What changed since the version a server holds; the full weights for a server that holds another.

    first publication                 full weights, a copy is kept (the snapshot)
    server at the snapshot's version  payload through the carrier; it answers with version and checksum
    any other, or one that refuses    full weights of the new version, from the snapshot
    the snapshot moves                once every server has taken the payload, refused it or failed

Called by `publisher.py`. A server that fails is forgotten: when it comes back it gets the full weights.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

import torch

from megathunder.publish.acknowledge import RefusedPayload, confirm, deliver
from megathunder.publish.delta.snapshot import Encoded, Snapshot
from megathunder.publish.envelope import Held, InFile, InGroup, Inline
from megathunder.publish.group import Pairs
from megathunder.publish.round import Round
from megathunder.publish.transports.base import Transport, Weights
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)


class Carrier(Protocol):
    """Brings sealed bytes to a server's loader."""

    async def carry(self, round: Round, server: ServerAddress, data: bytes) -> Held:
        """The loader's answer. Raises RefusedPayload or InfrastructureFailure."""
        ...


class HttpCarrier:
    """In the body of the request."""

    async def carry(self, round: Round, server: ServerAddress, data: bytes) -> Held:
        return await deliver(round, server, Inline(data=data))


class GroupCarrier:
    """By broadcast in the group of learner and server."""

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self._pairs, self._device = pairs, device

    async def carry(self, round: Round, server: ServerAddress, data: bytes) -> Held:
        await self._pairs.join(round.control, server, round.info[server].tp_size)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        told = asyncio.create_task(deliver(round, server, InGroup(group=self._pairs[server].name, size=len(data))))
        held, _ = await asyncio.gather(told, self._pairs.broadcast(server, tensor))
        return held


class FolderCarrier:
    """As a file in a folder that learner and servers share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def carry(self, round: Round, server: ServerAddress, data: bytes) -> Held:
        self._folder.mkdir(parents=True, exist_ok=True)
        final, partial = self._folder / f"{server.name}.delta", self._folder / f".{server.name}.partial"
        partial.write_bytes(data)
        partial.rename(final)
        try:
            return await deliver(round, server, InFile(path=str(final.resolve()), size=len(data)))
        finally:
            final.unlink(missing_ok=True)


class DeltaTransport:
    """`full` sends whole weights; `carrier` brings the payloads."""

    def __init__(self, full: Transport, carrier: Carrier) -> None:
        self._full, self._carrier = full, carrier
        self._snapshot = Snapshot()
        self._held: dict[ServerAddress, tuple[int, int]] = {}  # version and checksum a server acknowledged
        self.changed = 0  # elements, in the last publication

    def send(self, round: Round, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        if self._snapshot.version < 0:
            sent = self._full.send(round, servers, version, self._snapshot.take(version, weights))
            self._remember(round, servers)
            return sent
        known = (self._snapshot.version, self._snapshot.checksum)
        at_base = tuple(server for server in servers if self._held.get(server) == known)
        encoded = self._snapshot.encode(version, weights)
        self.changed = encoded.changed
        refused = self._send_change(round, at_base, encoded)
        self._snapshot.advance(encoded)
        others = tuple(server for server in servers if server not in at_base or server in refused)
        sent = len(encoded.data) if at_base else 0
        if others and round.live(others):
            sent = max(sent, self._full.send(round, others, version, self._snapshot.tensors.items()))
        self._remember(round, servers)
        return sent

    def _send_change(self, round: Round, servers: tuple[ServerAddress, ...], encoded: Encoded) -> set[ServerAddress]:
        """Servers that refused; those that failed are in `round.failed`."""
        refused: set[ServerAddress] = set()

        async def one(server: ServerAddress) -> None:
            try:
                held = await self._carrier.carry(round, server, encoded.data)
            except RefusedPayload as refusal:
                log.warning("%s; it gets the full weights", refusal)
                refused.add(server)
                return
            await confirm(round, server, held, encoded.header)

        round.each(one, servers)
        return refused

    def _remember(self, round: Round, servers: tuple[ServerAddress, ...]) -> None:
        for server in servers:
            for known in [known for known in self._held if known.name == server.name]:
                del self._held[known]
            if server.name not in round.failed:
                self._held[server] = (self._snapshot.version, self._snapshot.checksum)
