"""Attention over rows of at most a few hundred tokens as batched products, with a backward of its own: CPU, float32.

    S = scale Q K^T + mask,  P = softmax(S),  O = P V
    dV = P^T dO,  dS = P * (dO V^T - rowsum(dO * O)),  dQ = scale dS K,  dK = scale dS^T Q

P is kept for backward: rows x heads x Lq x Lk x 4 bytes a layer, at most KEPT_BYTES; torch's fused attention keeps
none and computes it again, which on short rows costs more than the products. Query heads that share keys are laid
side by side, so that keys and values are never repeated. Called by `attention.py`, whose fused call is the oracle.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

LONGEST_KEYS = 448  # beyond it the fused kernel was as fast
KEPT_BYTES = 64 << 20


def fits(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int, int]) -> bool:
    """Whether rows of `shape` (R, Lq, Lk) are computed here; q [T, heads, head], k and v [T, groups, head]."""
    rows, high, wide = shape
    plain = q.device.type == "cpu" and q.dtype is k.dtype is v.dtype is torch.float32
    return plain and wide <= LONGEST_KEYS and 4 * rows * q.shape[1] * high * wide <= KEPT_BYTES


def attend_short(
    q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int, int], mask: Tensor | None, scale: float
) -> Tensor:
    """q [R Lq, heads, head], k and v [R Lk, groups, head], mask [R, 1, Lq, Lk] of what is seen (None: causal)
    -> [R Lq, heads, head]."""
    rows, high, wide = shape
    (_, heads, head), groups = q.shape, k.shape[1]
    shared = heads // groups
    # [R, Lq, groups, shared, head] -> [R groups, shared Lq, head]
    q = q.view(rows, high, groups, shared, head).permute(0, 2, 3, 1, 4).reshape(rows * groups, shared * high, head)
    k, v = (x.view(rows, wide, groups, head).transpose(1, 2).reshape(rows * groups, wide, head) for x in (k, v))
    bias = _causal(high, shared) if mask is None else _bias(mask, groups, shared)
    out = _ShortAttention.apply(q, k, v, bias, scale).view(rows, groups, shared, high, head)
    return out.permute(0, 3, 1, 2, 4).reshape(rows * high, heads, head)


@functools.lru_cache(maxsize=64)
def _causal(high: int, shared: int) -> Tensor:
    bias = torch.zeros(high, high).masked_fill_(torch.ones(high, high).triu(1).bool(), -torch.inf)
    return bias.repeat(shared, 1)[None]


def _bias(mask: Tensor, groups: int, shared: int) -> Tensor:
    """[R groups, shared Lq, Lk], added to the scores."""
    rows, _, high, wide = mask.shape
    bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return bias[:, :, None].expand(rows, groups, shared, high, wide).reshape(rows * groups, shared * high, wide)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        probabilities = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale).softmax(-1)
        out = torch.bmm(probabilities, v)
        ctx.save_for_backward(q, k, v, probabilities, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, probabilities, out = ctx.saved_tensors
        dv = torch.bmm(probabilities.transpose(1, 2), gradient)
        along = (gradient * out).sum(-1, keepdim=True)
        ds = torch.baddbmm(along, gradient, v.transpose(1, 2), beta=-1).mul_(probabilities)
        dq = torch.bmm(ds, k).mul_(ctx.scale)
        dk = torch.bmm(ds.transpose(1, 2), q).mul_(ctx.scale)
        return dq, dk, dv, None, None
