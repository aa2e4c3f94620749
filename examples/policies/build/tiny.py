"""Tiny random models, one of each family, as Hugging Face folders: for the tests and for tools/parity.py.

Weights are wide enough that every part of a layer matters to the logits; the vocabulary (131) divides by no layout, so
padding is exercised. Needs transformers, which only tools and tests import.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megathunder.errors import ConfigError

_SHAPE = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 131,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "norm_topk_prob": True}
_ROTARY = {"rope_type": "default", "rope_theta": 1e6}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _qwen3(tied: bool) -> Any:
    import transformers

    return transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=tied, rope_parameters=_ROTARY)


def _qwen2() -> Any:
    import transformers

    return transformers.Qwen2Config(**{**_SHAPE, "head_dim": 8}, tie_word_embeddings=True, rope_parameters=_ROTARY)


def _mistral() -> Any:
    import transformers

    return transformers.MistralConfig(**_SHAPE, sliding_window=None, tie_word_embeddings=False, rope_parameters=_ROTARY)


def _llama() -> Any:
    import transformers

    return transformers.LlamaConfig(**_SHAPE, tie_word_embeddings=True, rope_parameters=_LLAMA3)


def _qwen3_moe() -> Any:
    import transformers

    return transformers.Qwen3MoeConfig(
        **_SHAPE, **_EXPERTS, num_experts=4, decoder_sparse_step=1, mlp_only_layers=[1], rope_parameters=_ROTARY
    )


def _glm4_moe() -> Any:
    import transformers

    return transformers.Glm4MoeConfig(
        **_SHAPE,
        **_EXPERTS,
        n_routed_experts=4,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters=_ROTARY | {"partial_rotary_factor": 0.5},
    )


TINY: dict[str, Callable[[], Any]] = {
    "qwen2": _qwen2,
    "mistral": _mistral,
    "qwen3": lambda: _qwen3(tied=False),
    "qwen3_tied": lambda: _qwen3(tied=True),
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
}
MIXTURES = ("qwen3_moe", "glm4_moe")


def make_tiny(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the tiny model `name` (a key of TINY) to `folder` and return it. Raises ConfigError for another name."""
    if name not in TINY:
        raise ConfigError(f"no tiny model {name!r}", expected=", ".join(TINY), remedy="name one of these, or a folder")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(TINY[name]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            norm = "norm" in key
            noise = torch.randn(parameter.shape, generator=generator) * (0.1 if norm else 0.08)
            parameter.copy_(noise + 1.0 if norm else noise)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return folder
