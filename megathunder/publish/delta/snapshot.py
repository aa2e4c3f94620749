"""The sender's copy of what every server holds, and the payload that takes it to the next version.

    encode    (snapshot of version b, weights of version b + 1) -> payload; the snapshot stays as it is
    advance   snapshot += payload                               once every server has answered

The snapshot changes by the bytes the servers applied, so that the two cannot part. One host copy of the weights.
Called by `transports/delta.py` and tools/bench_publish.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import torch
from torch import Tensor

from megathunder.publish.checksum import MASK, tensor_checksum
from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.coding import Coding, decode, encode
from megathunder.publish.payload import Action, Header, Piece, open_payload, seal
from megathunder.publish.words import dtype_name, word_of, words


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed payload and what it is made of."""

    data: bytes
    header: Header
    changed: int
    elements: int


class Snapshot:
    """`version` and `checksum` of the weights in `tensors` (name -> host tensor, in the order of the first export)."""

    def __init__(self) -> None:
        self.version, self.checksum = -1, 0
        self.tensors: dict[str, Tensor] = {}

    def take(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `weights`, which are `version`, on and keep a host copy of each."""
        tensors, checksum = {}, 0
        for name, tensor in weights:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            checksum += tensor_checksum(name, tensors[name])
            yield name, tensor
        self.tensors, self.version, self.checksum = tensors, version, checksum & MASK

    def encode(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Encoded:
        """The payload from this snapshot to `weights`, which must have the same names, types and shapes."""
        pieces, streams, checksum = [], [], 0
        for name, tensor in weights:
            tensor = tensor.detach().cpu().contiguous()
            old = self.tensors[name]
            if old.shape != tensor.shape or old.dtype != tensor.dtype:
                raise ValueError(f"{name} was {old.dtype} {tuple(old.shape)}, is {tensor.dtype} {tuple(tensor.shape)}")
            coded, parts = encode(words(old), words(tensor))
            checksum += tensor_checksum(name, tensor)
            pieces.append(Piece(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), coded=coded))
            streams.extend(parts)
        if len(pieces) != len(self.tensors):
            raise ValueError(f"{len(pieces)} tensors after a version of {len(self.tensors)}")
        header = Header(
            action=Action.APPLY,
            pieces=tuple(pieces),
            base=self.version,
            base_checksum=self.checksum,
            target=version,
            checksum=checksum & MASK,
        )
        return Encoded(
            data=seal(header, streams),
            header=header,
            changed=sum(piece.coded.changed for piece in pieces),
            elements=sum(piece.elements for piece in pieces),
        )

    @torch.no_grad()
    def advance(self, encoded: Encoded) -> None:
        """Move to the payload's version."""
        opened = open_payload(memoryview(encoded.data))
        for piece, data in opened.parts():
            if piece.coded.coding is not Coding.SAME:
                apply_change(self.tensors[piece.name], decode(piece.coded, data, piece.elements, word_of(piece.dtype)))
        self.version, self.checksum = opened.header.target, opened.header.checksum
