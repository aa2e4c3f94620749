"""Qwen3, dense: grouped-query attention with normalised queries and keys."""

from __future__ import annotations

from typing import Any

from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, HEAD, Family, dense_settings


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json."""
    return dense_settings(hf) | {"qk_layernorm": True}


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + HEAD,
)
