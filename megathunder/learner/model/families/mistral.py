"""Mistral without a sliding window (7B v0.2 and later, Nemo, Small): Llama's layers under another name."""

from __future__ import annotations

from typing import Any

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import ATTENTION, DENSE_MLP, HEAD, Family, dense_settings
from megathunder.registry import MODEL_FAMILIES


def settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields of a config.json. Refuses sliding windows, which the packed attention does not have."""
    if hf.get("sliding_window"):
        raise ConfigError(
            f"a Mistral model with sliding_window = {hf['sliding_window']}",
            expected="null, as in Mistral 7B v0.2 and later, Nemo and Small",
            remedy="use a model without a sliding window",
        )
    return dense_settings(hf) | {"qk_layernorm": False}


FAMILY = Family(
    architecture="MistralForCausalLM",
    models="Mistral 7B v0.2 and later, Nemo, Small",
    model_type="mistral",
    settings=settings,
    rules=ATTENTION + DENSE_MLP + HEAD,
)
MODEL_FAMILIES.register(FAMILY.architecture)(FAMILY)
