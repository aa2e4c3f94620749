"""The kernels of a decoder layer, and what one step of the engine gives all layers.

Shapes: N tokens of the batch, B sequences, H query heads, G key-value heads, D channels of a head, R of them rotated;
a row of `qkv` is [H + 2 G, D] flat. The cache of one layer is [slots, G, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Step:
    """One forward of the engine: B sequences, of which each computes its last `fresh[b]` positions (decoding: one)."""

    positions: Tensor  # [N] int64
    slots: Tensor  # [N] int64, where the keys and values of each token go
    table: Tensor  # [requests, positions] int32, cache slot of every position
    rows: Tensor  # [B] int64, row of `table` of each sequence
    lengths: Tensor  # [B] int64, positions each sequence sees, its newest included
    fresh: Tensor | None  # [B] int64; None: one each
    memo: object = None  # what a kernel works out once for all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The attention of one layer: its shape, its norms and its rotary embedding."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    cos_sin: Tensor  # [positions, R], cos ++ sin
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None
    eps: float


class Kernels(Protocol):
    """What `decoder_layer.py` computes between two GEMMs. Every tensor is float32 with unit stride in its last axis."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        """x [N, width] -> its norm, a new tensor; with `residual`: residual += x in place, and the norm of that."""

    def prepare_heads(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> None:
        """Norm and rotate the query and key heads of `qkv` [N, (H + 2 G) D] in place; keys and values to the cache."""

    def attend(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        """The heads' outputs, [N, H D]."""

    def silu_mul(self, x: Tensor) -> Tensor:
        """x [N, 2 width] = gate ++ up -> silu(gate) * up, [N, width]."""
