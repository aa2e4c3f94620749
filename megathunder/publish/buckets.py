"""Weights in buckets: whole tensors, in order, up to a size; one flat byte tensor a bucket.

The flat layout is the one rollout servers unpack: the tensors' bytes one after the other, in the order of the names.
Peak extra memory is the bucket being sent and the one being filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """`data` holds the tensors named, as bytes."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]  # torch names without the prefix: "float32"
    shapes: tuple[tuple[int, ...], ...]
    data: torch.Tensor  # [bytes] uint8


def buckets(weights: Iterable[tuple[str, torch.Tensor]], limit_bytes: int) -> Iterator[Bucket]:
    """Split `weights` into buckets of at most `limit_bytes` (a larger tensor travels alone)."""
    held: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit_bytes:
            yield _pack(held)
            held, size = [], 0
        held.append((name, tensor.detach()))
        size += tensor.nbytes
    if held:
        yield _pack(held)


def _pack(held: list[tuple[str, torch.Tensor]]) -> Bucket:
    return Bucket(
        names=tuple(name for name, _ in held),
        dtypes=tuple(str(t.dtype).removeprefix("torch.") for _, t in held),
        shapes=tuple(tuple(t.shape) for _, t in held),
        data=torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in held]),
    )
