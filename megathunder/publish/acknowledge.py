"""Talks to our loader inside a server: deliver a payload, ask what it says, and count the version as held.

    payload -> loader -> ServerWeights(version, checksum)      equal to what was sent: the server's version is set
                      -> ServerWeights(error)                  RefusedPayload: nothing changed, or no version left

Called by the transports. A server without our loader is refused before anything is sent: a message it does not know
would end it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

import msgspec
from torch import Tensor

from megathunder.errors import InfrastructureFailure, UserError
from megathunder.publish.bits import dtype_name
from megathunder.publish.checksum import MASK, tensor_checksum
from megathunder.publish.envelope import (
    ACKNOWLEDGEMENT,
    Envelope,
    InFile,
    InGroup,
    Inline,
    ServerWeights,
    as_tensors,
    from_parameter,
)
from megathunder.publish.payload import Action, Header, Piece, seal
from megathunder.publish.publish_session import PublishSession
from megathunder.rollout.servers.command import WEIGHT_LOADER
from megathunder.types import ServerAddress

_serials = itertools.count(int.from_bytes(os.urandom(4), "little") << 16)


class RefusedPayload(InfrastructureFailure):
    """The server read a message and did not take it; `held` is its answer."""

    def __init__(self, server: ServerAddress, held: ServerWeights) -> None:
        super().__init__(f"{server.name} refused the weights: {held.error}")
        self.held = held


class Manifest:
    """What passes through `watch`: the pieces' names, types and shapes, and the checksum of all of them."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.checksum = 0
        self.payload_bytes = 0

    def watch(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `weights` on and note them."""
        for name, tensor in weights:
            self.pieces.append(Piece(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape)))
            self.checksum = (self.checksum + tensor_checksum(name, tensor)) & MASK
            self.payload_bytes += tensor.nbytes
            yield name, tensor

    def adoption(self, version: int) -> Header:
        """The message that asks a server whether it holds these weights, which are `version`."""
        return Header(action=Action.ADOPT, pieces=tuple(self.pieces), target=version, checksum=self.checksum)


async def deliver(round: PublishSession, server: ServerAddress, payload: Inline | InGroup | InFile) -> ServerWeights:
    """Have the server's loader act on `payload`. Raises RefusedPayload, and InfrastructureFailure where no answer
    to this very message comes back."""
    info = round.info[server]
    if WEIGHT_LOADER not in info.custom_weight_loader:
        raise UserError(
            f"{server.name} at {server.url} was started without our weight loader",
            expected=f"--custom-weight-loader {WEIGHT_LOADER}, and megathunder importable there",
            remedy="start the server so, or set publish.checksum = false and publish.transport = distributed",
        )
    envelope = Envelope(serial=next(_serials), payload=payload, timeout_s=round.timeout_s)
    tensors = as_tensors(envelope)
    await round.control.update_from_tensors(server, tensors=tensors, loader=WEIGHT_LOADER, ranks=info.tp_size)
    held = await ask(round, server)
    if held.serial != envelope.serial:
        raise InfrastructureFailure(f"{server.name} answered message {held.serial}, not {envelope.serial}")
    if held.error:
        raise RefusedPayload(server, held)
    return held


async def ask(round: PublishSession, server: ServerAddress) -> ServerWeights:
    """What the loader answered last. Raises InfrastructureFailure where it never acted."""
    values = await round.control.parameter(server, ACKNOWLEDGEMENT)
    try:
        return from_parameter(values)
    except (ValueError, msgspec.DecodeError) as error:
        raise InfrastructureFailure(f"{server.name} gave an acknowledgement that cannot be read: {error}") from error


async def acknowledge(round: PublishSession, server: ServerAddress, adoption: bytes, header: Header) -> None:
    """Count the weights a server has loaded as the header's version, once it says that it holds them."""
    held = await deliver(round, server, Inline(data=adoption))
    await confirm(round, server, held, header)


async def confirm(round: PublishSession, server: ServerAddress, held: ServerWeights, header: Header) -> None:
    """Set the server's version where its answer is the header's version and checksum."""
    if (held.version, held.checksum) != (header.target, header.checksum):
        raise InfrastructureFailure(
            f"{server.name} holds version {held.version} with checksum {held.checksum:016x}; sent were version "
            f"{header.target} with {header.checksum:016x}"
        )
    await round.control.set_version(server, header.target)


def adopt_everywhere(
    round: PublishSession, servers: Iterable[ServerAddress], manifest: Manifest, version: int, *, checksum: bool = True
) -> None:
    """After dense weights were loaded by the engine's own means: every server says what it holds, or fails.
    Without `checksum` its word is not asked for."""
    header = manifest.adoption(version)
    adoption = seal(header)

    async def one(server: ServerAddress) -> None:
        if checksum:
            await acknowledge(round, server, adoption, header)
        else:
            await round.control.set_version(server, version)

    round.each(one, servers)
