"""Full weights in the requests themselves: sealed buckets of dense pieces that our loader writes.

For servers that share neither a network for broadcasts nor a folder with the learner. While buckets arrive the server
has no version; the adoption at the end gives it one. Called by the delta transport over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megathunder.publish.acknowledge import Manifest, adopt_everywhere, deliver
from megathunder.publish.bits import as_uint, dtype_name
from megathunder.publish.delta.coding import Coding, EncodedTensor
from megathunder.publish.envelope import Inline
from megathunder.publish.payload import Action, Header, Piece, seal
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Weights
from megathunder.types import ServerAddress

FUSED_WITH = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class FillingTransport:
    """One bucket travels while the next one is packed."""

    def __init__(self, *, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`."""
        manifest = Manifest()
        travelling = None
        for data in self._sealed(manifest.watch(weights)):

            async def one(server: ServerAddress, data: bytes = data) -> None:
                await deliver(round, server, Inline(data=data))

            if travelling:
                travelling.result()
            travelling = round.start(one, servers)
        if travelling:
            travelling.result()
        adopt_everywhere(round, servers, manifest, version)
        return manifest.payload_bytes

    def _sealed(self, weights: Weights) -> Iterator[bytes]:
        """Buckets that end between modules, so that what the engine fuses is described together."""
        held: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in weights:
            if held and size + tensor.nbytes > self._bucket_bytes and name.split(".")[-2] not in FUSED_WITH:
                yield _seal(held)
                held, size = [], 0
            held.append((name, tensor))
            size += tensor.nbytes
        if held:
            yield _seal(held)


def _seal(held: list[tuple[str, Tensor]]) -> bytes:
    pieces, streams = [], []
    for name, tensor in held:
        data = as_uint(tensor).tobytes()
        coded = EncodedTensor(coding=Coding.DENSE, changed=tensor.numel(), sizes=(len(data),))
        pieces.append(Piece(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), coded=coded))
        streams.append(data)
    return seal(Header(action=Action.FILL, pieces=tuple(pieces)), streams)
