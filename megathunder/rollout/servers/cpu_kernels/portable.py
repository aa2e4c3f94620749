"""The kernels in plain torch: for machines without a C compiler, and the oracle of `compiled.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megathunder.rollout.servers.cpu_kernels.interface import Heads, Step
from megathunder.speculation.attention import Block, blocks_of


class PortableKernels:
    """`interface.Kernels`; attention of all sequences at once, padded under a mask."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        return F.rms_norm(x if residual is None else residual.add_(x), weight.shape, weight, eps)

    def prepare_heads(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> None:
        rows = qkv.view(qkv.shape[0], -1, heads.size)
        query, key, value = rows.split([heads.heads, heads.kv_heads, heads.kv_heads], 1)
        cos, sin = heads.cos_sin.index_select(0, step.positions)[:, None].chunk(2, -1)
        for part, weight in ((query, heads.query_norm), (key, heads.key_norm)):
            if weight is not None:
                part.copy_(F.rms_norm(part, weight.shape, weight, heads.eps))
            first, second = part[..., : heads.cos_sin.shape[1]].chunk(2, -1)
            turned = first * cos - second * sin, second * cos + first * sin
            first.copy_(turned[0])
            second.copy_(turned[1])
        keys.index_copy_(0, step.slots, key)
        values.index_copy_(0, step.slots, value)

    def attend(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        if step.memo is None:
            widths = [1] * len(step.rows) if step.fresh is None else step.fresh.tolist()
            step.memo = blocks_of(step.lengths.tolist(), widths, step.rows, step.table, qkv.dtype)
        query = qkv.view(qkv.shape[0], -1, heads.size)[:, : heads.heads]
        out = torch.empty(query.shape)
        for block in step.memo:
            out.index_copy_(0, block.rows, _attend(block, query, keys, values, heads))
        return out.flatten(1)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def _attend(block: Block, query: Tensor, keys: Tensor, values: Tensor, heads: Heads) -> Tensor:
    requests = block.mask.shape[0]
    parts = ((query, block.source), (keys, block.slots), (values, block.slots))
    q, k, v = (x.index_select(0, index).unflatten(0, (requests, -1)).transpose(1, 2) for x, index in parts)
    shared = heads.heads != heads.kv_heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, scale=heads.scale, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, block.back)
