"""GLM-4.5 style mixture of experts: sigmoid router with a selection bias, shared experts, dense first layers."""

from __future__ import annotations

from typing import Any

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, EXPERT_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json. The router's bias is kept as the model has it (update rate 0)."""
    if not hf.get("norm_topk_prob", True):
        raise ConfigError(
            "norm_topk_prob is false in config.json",
            expected="true: a token's chosen experts share a weight of one",
            remedy="use a GLM-4.5 model with norm_topk_prob",
        )
    groups = hf.get("n_group", 1)
    chosen_groups = {"moe_router_num_groups": groups, "moe_router_group_topk": hf["topk_group"]} if groups > 1 else {}
    shared = hf.get("n_shared_experts", 0) * hf["moe_intermediate_size"]
    dense = hf.get("first_k_dense_replace", 1)
    return (
        dense_settings(hf)
        | chosen_groups
        | {
            "qk_layernorm": bool(hf.get("use_qk_norm", False)),
            "num_moe_experts": hf["n_routed_experts"],
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": shared or None,
            "moe_layer_freq": [int(l >= dense) for l in range(hf["num_hidden_layers"])],
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor", 1.0),
        }
    )


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5-Air, GLM-4.5",
    model_type="glm4_moe",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + EXPERT_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
