"""What a pack of rows costs: floating-point operations of a forward and backward pass.

    forward = 2 F T + 4 L d_attn sum_r (pairs of row r),   pairs = (end^2 - first^2) / 2,   backward = 2 forward

F: parameters that multiply an activation (experts: those active for a token; the vocabulary projection only for the
N trained tokens), L layers, d_attn = heads x head size. Of the whole model, so tensor and pipeline ranks share it.
Called by `learner.py` for `WorkStats.flops`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """`per_token` and `per_trained_token` multiply-adds, `per_pair` those of one query-key pair over all layers."""

    per_token: int
    per_trained_token: int
    per_pair: int

    @classmethod
    def of(cls, config: TransformerConfig, vocabulary: int) -> Price:
        hidden, head = config.hidden_size, config.kv_channels
        queries, keys = config.num_attention_heads * head, config.num_query_groups * head
        attention = hidden * (queries + 2 * keys) + queries * hidden
        ways = 3 if config.gated_linear_unit else 2
        total = 0
        for layer in range(config.num_layers):
            total += attention + (
                _experts(config, ways) if _has_experts(config, layer) else ways * hidden * config.ffn_hidden_size
            )
        return cls(per_token=total, per_trained_token=hidden * vocabulary, per_pair=2 * config.num_layers * queries)

    def flops(self, spans: Iterable[tuple[int, int]], trained: int, *, passes: int = 3) -> float:
        """`spans` are each row's [first, end) positions; `passes` 1 is forward alone, 3 forward and backward."""
        tokens = pairs = 0
        for first, end in spans:
            tokens += end - first
            pairs += (end * end - first * first) // 2
        return 2.0 * passes * (self.per_token * tokens + self.per_trained_token * trained + self.per_pair * pairs)


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    if not config.num_moe_experts:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0


def _experts(config: TransformerConfig, ways: int) -> int:
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    active = config.moe_router_topk * width + (config.moe_shared_expert_intermediate_size or 0)
    return config.hidden_size * (ways * active + config.num_moe_experts)
