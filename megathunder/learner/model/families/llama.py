"""Llama and what shares its architecture (SmolLM2)."""

from __future__ import annotations

from typing import Any

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json. Refuses biases, which would go into no Megatron parameter."""
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ConfigError(
            "a Llama model with attention_bias or mlp_bias",
            expected="both false, as in every published Llama and SmolLM2",
            remedy="use a model without biases",
        )
    return dense_settings(hf) | {"qk_layernorm": False}


FAMILY = Family(
    architecture="LlamaForCausalLM",
    models="Llama 3 (1B to 405B), SmolLM2",
    model_type="llama",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
