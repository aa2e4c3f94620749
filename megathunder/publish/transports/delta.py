"""What changed since the version a server holds; the full weights for a server that holds another.

    first publication                 full weights, a copy is kept (the snapshot)
    server at the snapshot's version  payload through the carrier; it answers with version and checksum
    any other, or one that refuses    full weights of the new version, from the snapshot
    the snapshot moves                once every server has taken the payload, refused it or failed; in a thread of its
                                      own, while the next rollouts run

Called by `publisher.py`. A server that fails is forgotten: when it comes back it gets the full weights.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from megathunder.publish.acknowledge import RefusedPayload, confirm
from megathunder.publish.delta.snapshot import Encoded, Snapshot
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Transport, Weights
from megathunder.publish.transports.carriers import Carrier
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)


class DeltaTransport:
    """`full` sends whole weights; `carrier` brings the payloads."""

    def __init__(self, full: Transport, carrier: Carrier, *, threads: int = 1) -> None:
        self._full, self._carrier = full, carrier
        self._snapshot = Snapshot(threads=threads)
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._moving: Future[None] | None = None
        self._held: dict[ServerAddress, tuple[int, int]] = {}  # version and checksum a server acknowledged
        self.changed = 0  # elements, in the last publication

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        self._settle()
        if self._snapshot.version < 0:
            sent = self._full.send(round, servers, version, self._snapshot.take(version, weights))
            self._remember(round, servers, (version, self._snapshot.checksum))
            return sent
        known = (self._snapshot.version, self._snapshot.checksum)
        at_base = tuple(server for server in servers if self._held.get(server) == known)
        encoded = self._snapshot.encode(version, weights)
        self.changed = encoded.changed
        refused = self._send_change(round, at_base, encoded)
        self._moving = self._mover.submit(self._snapshot.advance, encoded)
        others = tuple(server for server in servers if server not in at_base or server in refused)
        sent = len(encoded.data) if at_base else 0
        if others and round.live(others):
            self._settle()
            sent = max(sent, self._full.send(round, others, version, self._snapshot.tensors.items()))
        self._remember(round, servers, (version, encoded.header.checksum))
        return sent

    def _settle(self) -> None:
        """Wait until the snapshot has moved."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.result()

    def _send_change(
        self, round: PublishSession, servers: tuple[ServerAddress, ...], encoded: Encoded
    ) -> set[ServerAddress]:
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

    def _remember(self, round: PublishSession, servers: tuple[ServerAddress, ...], held: tuple[int, int]) -> None:
        for server in servers:
            for known in [known for known in self._held if known.name == server.name]:
                del self._held[known]
            if server.name not in round.failed:
                self._held[server] = held
