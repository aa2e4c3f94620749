"""Qwen3-MoE: softmax router over all experts, top-k renormalised, no shared expert."""

from __future__ import annotations

from typing import Any

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, EXPERT_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json."""
    if not hf.get("norm_topk_prob", False):
        raise ConfigError(
            "norm_topk_prob is false in config.json",
            expected="true: the router's softmax is taken over the chosen experts",
            remedy="use a Qwen3-MoE model with norm_topk_prob",
        )
    layers = range(hf["num_hidden_layers"])
    dense, step = set(hf.get("mlp_only_layers") or ()), hf.get("decoder_sparse_step", 1)
    return dense_settings(hf) | {
        "qk_layernorm": True,
        "num_moe_experts": hf.get("num_local_experts") or hf["num_experts"],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(l not in dense and (l + 1) % step == 0) for l in layers],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
    }


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    model_type="qwen3_moe",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + EXPERT_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
