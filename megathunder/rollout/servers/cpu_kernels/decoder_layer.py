"""A decoder layer of Llama, Qwen2, Qwen3 or a mixture of their kind by the kernels.

    residual += x;  y = norm(residual);  qkv = y W_qkv;  norm, rotate, cache;  attend;  o = ... W_o
    residual += o;  y = norm(residual);  the dense feed-forward part by the kernels, experts by SGLang's own module

Called in place of a layer's `forward` (`plugin.py`); says when a layer or a step does not fit, and SGLang's own path
takes it: other types than float32, tensor parallelism, quantised or adapted weights, sliding windows, interleaved or
multi-section rotary embeddings, steps that verify a tree of drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megathunder.rollout.servers.cpu_kernels.interface import Heads, Kernels, Step
from megathunder.rollout.servers.cpu_kernels.packed_weights import PackedWeights, fits

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

_PLAN, _STEP = "_megathunder_plan", "_megathunder_step"
_ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding")  # subclasses differ in how they fill the table of cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is known of a layer that fits."""

    heads: Heads
    dense: bool  # its feed-forward part is gate, up and down, by the kernels


def forward_layer(
    layer: nn.Module,
    kernels: Kernels,
    packed: PackedWeights,
    positions: Tensor,
    hidden: Tensor,
    batch: ForwardBatch,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """hidden [N, width] and residual [N, width] -> the layer's two; None where SGLang's own path must take it."""
    plan = _plan(layer)
    step = plan and _step(batch, positions, hidden)
    if step is None:
        return None
    pool = _backend().token_to_kv_pool
    attention, feed_forward = layer.self_attn, layer.mlp
    number = attention.attn.layer_id
    keys, values = pool.get_key_buffer(number), pool.get_value_buffer(number)
    before, after = layer.input_layernorm, layer.post_attention_layernorm
    if residual is None:
        residual = hidden.clone()
        y = kernels.rms_norm(residual, before.weight, before.variance_epsilon)
    else:
        y = kernels.rms_norm(hidden, before.weight, before.variance_epsilon, residual)
    qkv = packed.linear(attention.qkv_proj, y, attention.qkv_proj.bias)
    kernels.prepare_heads(qkv, plan.heads, step, keys, values)
    attended = kernels.attend(qkv, plan.heads, step, keys, values)
    out = packed.linear(attention.o_proj, attended, attention.o_proj.bias)
    y = kernels.rms_norm(out, after.weight, after.variance_epsilon, residual)
    if not plan.dense:
        return feed_forward(y, batch), residual
    activated = kernels.silu_mul(packed.linear(feed_forward.gate_up_proj, y))
    return packed.linear(feed_forward.down_proj, activated), residual


def attend_rows(
    kernels: Kernels,
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    fresh: Tensor | None,
    options: dict[str, object],
) -> bool:
    """Attention alone, for layers of other models: query [N, H, D] -> output [N, H, D], filled in; `where`: table, rows
    and lengths as in `Step`. False, and nothing done, where it does not fit."""
    window = options.get("sliding_window_size")
    plain = not options.get("is_cross_attn") and (window is None or window < 0)
    tensors = (query, keys, values)
    size = query.shape[2]
    if not plain or not all(t.dtype is torch.float32 and t.stride()[1:] == (size, 1) for t in tensors):
        return False
    table, rows, lengths = where
    step = Step(positions=lengths, slots=lengths, table=table, rows=rows, lengths=lengths, fresh=fresh)
    if values.shape[2] != size or not _is_indexed(step):
        return False
    scale = options.get("scaling")
    heads = Heads(
        heads=query.shape[1],
        kv_heads=keys.shape[1],
        size=size,
        scale=size**-0.5 if scale is None else scale,
        cos_sin=query,
        query_norm=None,
        key_norm=None,
        eps=0.0,
    )
    output.copy_(kernels.attend(query.flatten(1), heads, step, keys, values).view(output.shape))
    return True


def _plan(layer: nn.Module) -> Plan | None:
    kept = layer.__dict__
    if _PLAN not in kept:
        kept[_PLAN] = _make_plan(layer)
    return kept[_PLAN]


def _make_plan(layer: nn.Module) -> Plan | None:
    from sglang.srt.runtime_context import get_parallel

    attention, feed_forward = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if getattr(attention, "use_qk_norm", True) is False:
        norms = [None, None]
    rotary, core = attention.rotary_emb, attention.attn
    kept_whole = (layer.input_layernorm, layer.post_attention_layernorm, *filter(None, norms))
    if not (
        get_parallel().tp_size == 1
        and fits(attention.qkv_proj)
        and fits(attention.o_proj)
        and all(map(_is_plain_norm, kept_whole))
        and type(rotary).__name__ in _ROTARY
        and rotary.is_neox_style
        and rotary.cos_sin_cache.dtype is torch.float32
        and core.v_head_dim == core.qk_head_dim == attention.head_dim
        and (core.sliding_window_size is None or core.sliding_window_size < 0)
    ):
        return None
    dense = all(fits(getattr(feed_forward, name, None)) for name in ("gate_up_proj", "down_proj"))
    dense = dense and type(feed_forward.act_fn).__name__ == "SiluAndMul"
    return Plan(
        heads=Heads(
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            size=attention.head_dim,
            scale=attention.scaling,
            cos_sin=rotary.cos_sin_cache,
            query_norm=norms[0].weight.data if norms[0] is not None else None,
            key_norm=norms[1].weight.data if norms[1] is not None else None,
            eps=norms[0].variance_epsilon if norms[0] is not None else 0.0,
        ),
        dense=dense,
    )


def _is_plain_norm(norm: nn.Module) -> bool:
    return (
        type(norm).__name__ == "RMSNorm"
        and norm.weight.dtype is torch.float32
        and norm.variance_size_override is None
        and not norm.fp32_residual
    )


def _step(batch: ForwardBatch, positions: Tensor, hidden: Tensor) -> Step | None:
    """What this forward gives all layers; made at its first layer."""
    kept = batch.__dict__.get(_STEP)
    if kept is None:
        kept = batch.__dict__[_STEP] = (_make_step(batch, positions, hidden),)
    return kept[0]


def _make_step(batch: ForwardBatch, positions: Tensor, hidden: Tensor) -> Step | None:
    mode = batch.forward_mode
    reads = mode.is_extend() and not (mode.is_mixed() or mode.is_target_verify() or mode.is_draft_extend_v2())
    if not (reads or mode.is_decode()) or hidden.dtype is not torch.float32 or not hidden.shape[0]:
        return None
    backend = _backend()
    if type(backend).__name__ != "TorchNativeAttnBackend" or backend.use_sliding_window_kv_pool:
        return None
    if backend.token_to_kv_pool.get_key_buffer(backend.token_to_kv_pool.start_layer or 0).dtype is not torch.float32:
        return None
    step = Step(
        positions=positions,
        slots=batch.out_cache_loc,
        table=backend.req_to_token_pool.req_to_token,
        rows=batch.req_pool_indices,
        lengths=batch.seq_lens,
        fresh=batch.extend_seq_lens.to(torch.int64) if reads else None,
    )
    tokens = int(step.fresh.sum()) if reads else step.lengths.shape[0]
    if positions.dim() != 1 or not _is_indexed(step) or not tokens == hidden.shape[0] == step.slots.shape[0]:
        return None
    return step


def _is_indexed(step: Step) -> bool:
    """Whether the indices are of the types the kernels read."""
    long = (step.positions, step.slots, step.rows, step.lengths, *(() if step.fresh is None else (step.fresh,)))
    return all(t.dtype is torch.int64 and t.is_contiguous() for t in long) and step.table.dtype is torch.int32


def _backend() -> AttentionBackend:
    from sglang.srt.model_executor.forward_context import get_attn_backend

    return get_attn_backend()
