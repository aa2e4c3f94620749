"""The frozen weights that adapters sit on, kept inside a rollout server beside the merged ones it computes with.

    keep     parameters with the checksum of the base -> a copy, in host memory, of this rank's part of what is adapted
    merge    parameter = round(base + scale * B A)      `learner/model/low_rank.py`: the learner's own bits,
    shard by shard

Called by `loader.py`. Refuses factors that do not have the size their description gives, and another base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megathunder.learner.model.low_rank import merge
from megathunder.publish.bits import FLOATS
from megathunder.publish.delta.coding import Coding
from megathunder.publish.engine.fused_layout import FusedLayout, ShardView
from megathunder.publish.payload import Header, PayloadError, Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """`parts`: what this rank holds of each adapted tensor; `checksum`: of the whole base, over all ranks."""

    checksum: int
    parts: dict[str, Tensor]

    @classmethod
    def keep(cls, header: Header, places: FusedLayout) -> Base:
        """A copy of what the header marks as adapted."""
        names = [piece.name for piece in header.pieces if is_adapted(piece)]
        return cls(checksum=header.checksum, parts={name: places[name].view.to("cpu", copy=True) for name in names})

    def has(self, header: Header) -> bool:
        """Whether this is the base the header means, with all that it adapts."""
        adapted = {piece.name for piece in header.pieces if is_adapted(piece)}
        return self.checksum == header.base_checksum and adapted <= self.parts.keys()

    def merge(self, piece: Piece, data: memoryview, place: ShardView, header: Header) -> None:
        """Write the merged weights of one tensor."""
        if not place.view.numel():
            return
        a, b = factors(piece, data, header)
        height, width = place.view.numel() // place.view.shape[-1], place.view.shape[-1]
        a, b = a[:, place.column : place.column + width], b[place.row : place.row + height]
        device = place.view.device
        merged = merge(self.parts[piece.name].to(device), b.to(device), a.to(device), header.scale)
        place.view.copy_(merged)


def is_adapted(piece: Piece) -> bool:
    """Whether an adapter sits on the tensor."""
    return piece.coded is not None and piece.coded.coding is Coding.LOW_RANK


def factors(piece: Piece, data: memoryview, header: Header) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] of one tensor."""
    rank, (height, width) = piece.coded.changed, piece.shape
    kind = FLOATS[header.factors]
    flat = torch.frombuffer(bytearray(data), dtype=kind)
    return flat[: rank * width].view(rank, width), flat[rank * width :].view(height, rank)


def check_factors(header: Header) -> None:
    """Raise PayloadError for factors whose sizes are not those of their tensors."""
    if header.factors not in FLOATS:
        raise PayloadError(f"factors of type {header.factors!r}; known are {', '.join(FLOATS)}")
    for piece in filter(is_adapted, header.pieces):
        rank = piece.coded.changed
        expected = (rank * sum(piece.shape) * FLOATS[header.factors].itemsize,)
        if len(piece.shape) != 2 or rank < 1 or piece.coded.sizes != expected:
            raise PayloadError(f"{piece.name} {piece.shape}: factors of rank {rank} in {piece.coded.sizes} bytes")
