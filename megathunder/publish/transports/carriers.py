"""What brings a sealed payload to the loader inside a server: the request's body, a broadcast, or a shared folder.

Called by the transports that send payloads of their own (`delta.py`, `adapter.py`). A payload that cannot be brought is
that server's failure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from megathunder.publish.acknowledge import deliver
from megathunder.publish.envelope import InFile, InGroup, Inline, ServerWeights
from megathunder.publish.group import Pairs
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.folder import writing
from megathunder.types import ServerAddress


class Carrier(Protocol):
    """Brings sealed bytes to a server's loader."""

    async def carry(self, round: PublishSession, server: ServerAddress, data: bytes) -> ServerWeights:
        """The loader's answer. Raises RefusedPayload or InfrastructureFailure."""
        ...


class HttpCarrier:
    """In the body of the request."""

    async def carry(self, round: PublishSession, server: ServerAddress, data: bytes) -> ServerWeights:
        return await deliver(round, server, Inline(data=data))


class GroupCarrier:
    """By broadcast in the group of learner and server."""

    def __init__(self, pairs: Pairs, device: torch.device) -> None:
        self._pairs, self._device = pairs, device

    async def carry(self, round: PublishSession, server: ServerAddress, data: bytes) -> ServerWeights:
        await self._pairs.join(round.control, server, round.info[server].tp_size)
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        told = deliver(round, server, InGroup(group=self._pairs[server].name, size=len(data)))
        return await self._pairs.exchange(server, told, tensor)


class FolderCarrier:
    """As a file in a folder that learner and servers share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def carry(self, round: PublishSession, server: ServerAddress, data: bytes) -> ServerWeights:
        final, partial = self._folder / f"{server.name}.delta", self._folder / f".{server.name}.partial"
        with writing(self._folder, partial):
            partial.write_bytes(data)
            partial.rename(final)
        try:
            return await deliver(round, server, InFile(path=str(final.resolve()), size=len(data)))
        finally:
            final.unlink(missing_ok=True)
