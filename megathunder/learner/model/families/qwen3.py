"""Qwen3, dense: grouped-query attention with normalised queries and keys."""

from __future__ import annotations

from typing import Any

from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json."""
    return dense_settings(hf) | {"qk_layernorm": True}


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    models="Qwen3 0.6B to 32B",
    model_type="qwen3",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
