"""Qwen2 and Qwen2.5, dense: grouped-query attention with query, key and value biases, which config.json omits."""

from __future__ import annotations

from typing import Any

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json. Refuses sliding windows, which the packed attention does not have."""
    if hf.get("use_sliding_window"):
        raise ConfigError(
            "a Qwen2 model with use_sliding_window = true",
            expected="false, as in every published Qwen2.5",
            remedy="set use_sliding_window to false in config.json, or use another model",
        )
    return dense_settings(hf) | {"qk_layernorm": False, "add_qkv_bias": True}


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5 0.5B to 72B",
    model_type="qwen2",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
