"""The sender's copy of what every server holds, and the payload that takes it to the next version.

    encode    (snapshot of version b, weights of version b + 1) -> payload; the snapshot stays as it is
    advance   snapshot += payload                               once every server has answered, beside what comes next

The snapshot changes by the bytes the servers applied, so that the two cannot part. One host copy of the weights.
Called by `transports/delta.py` and benchmarks/bench_publish.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from torch import Tensor

from megathunder.publish.bits import as_uint, dtype_name, uint_dtype
from megathunder.publish.checksum import MASK, changed_checksum, tensor_checksum
from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.coding import Coding, decode, encode
from megathunder.publish.payload import Action, Header, Piece, open_payload, seal

FEW = 0.15  # changed fraction below which changed words alone are read for the checksum


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed payload and what it is made of."""

    data: bytes
    header: Header
    checksums: dict[str, int]  # of every tensor's new weights
    changed: int
    elements: int


class Snapshot:
    """`version` and `checksum` of the weights in `tensors` (name -> host tensor, in the order of the first export).
    Tensors are compared and coded by `threads` threads, which hold two tensors each beside the snapshot."""

    def __init__(self, *, threads: int = 1) -> None:
        self.version, self.checksum = -1, 0
        self.tensors: dict[str, Tensor] = {}
        self._checksums: dict[str, int] = {}
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")

    def take(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass `weights`, which are `version`, on and keep a host copy of each."""
        tensors, checksums = {}, {}
        for name, tensor in weights:
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            checksums[name] = tensor_checksum(name, tensors[name])
            yield name, tensor
        self.tensors, self._checksums, self.version = tensors, checksums, version
        self.checksum = sum(checksums.values()) & MASK

    def encode(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Encoded:
        """The payload from this snapshot to `weights`, which must have the same names, types and shapes."""
        pieces, streams, checksums = [], [], {}
        for piece, parts, checksum in self._coded(weights):
            pieces.append(piece)
            streams.extend(parts)
            checksums[piece.name] = checksum
        if len(pieces) != len(self.tensors):
            raise ValueError(f"{len(pieces)} tensors after a version of {len(self.tensors)}")
        header = Header(
            action=Action.APPLY,
            pieces=tuple(pieces),
            base=self.version,
            base_checksum=self.checksum,
            target=version,
            checksum=sum(checksums.values()) & MASK,
        )
        return Encoded(
            data=seal(header, streams),
            header=header,
            checksums=checksums,
            changed=sum(piece.coded.changed for piece in pieces),
            elements=sum(piece.elements for piece in pieces),
        )

    @torch.no_grad()
    def advance(self, encoded: Encoded) -> None:
        """Move to the payload's version."""
        opened = open_payload(memoryview(encoded.data))
        for piece, data in opened.parts():
            if piece.coded.coding is not Coding.SAME:
                apply_change(
                    self.tensors[piece.name], decode(piece.coded, data, piece.elements, uint_dtype(piece.dtype))
                )
        self._checksums = encoded.checksums
        self.version, self.checksum = opened.header.target, opened.header.checksum

    def _coded(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Piece, list[bytes], int]]:
        """`_code` of every tensor, in order; the next ones arrive while the last ones are coded."""
        waiting: deque[Future[tuple[Piece, list[bytes], int]]] = deque()
        for name, tensor in weights:
            waiting.append(self._pool.submit(self._code, name, tensor.detach().cpu().contiguous()))
            if len(waiting) >= 2 * self._threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _code(self, name: str, new: Tensor) -> tuple[Piece, list[bytes], int]:
        """One tensor's piece, its streams, and its checksum, from that of the snapshot where few words changed."""
        old = self.tensors[name]
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(f"{name} was {old.dtype} {tuple(old.shape)}, is {new.dtype} {tuple(new.shape)}")
        shape, before, after = tuple(new.shape), as_uint(old), as_uint(new)
        positions = np.flatnonzero(before != after)
        coded, streams = encode(before, after, positions)
        moved = None
        if positions.size < FEW * after.size:
            moved = changed_checksum(name, shape, old, new, positions)
        checksum = tensor_checksum(name, new) if moved is None else (self._checksums[name] + moved) & MASK
        return Piece(name=name, dtype=dtype_name(new), shape=shape, coded=coded), streams, checksum
