"""A policy to measure servers with: random weights, as wide as wanted, the tokenizer of a policy that is there.

What a server spends depends on the shape of a model and not on what it has learnt. The policies that ship here are so
narrow that reading a prompt token costs next to nothing beside a decode step, which is not so for any model people use.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megathunder.errors import ConfigError

HEAD, LONGEST = 64, 4096


def wide_policy(folder: Path, tokenizer: Path, *, hidden: int, layers: int, seed: int = 0) -> Path:
    """Write a Qwen3 policy of `hidden` units (a multiple of 128) and `layers` layers to `folder`; its path.

    fp32, `hidden` / 64 heads of which every second shares its keys, MLPs of 3 `hidden` units, contexts of 4,096 tokens.
    """
    if hidden < 2 * HEAD or hidden % (2 * HEAD) or layers < 1:
        raise ConfigError(
            f"a policy of {hidden} units and {layers} layers",
            expected=f"a multiple of {2 * HEAD} units, at least one layer",
            remedy="change --hidden or --layers",
        )
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // (2 * HEAD),
        head_dim=HEAD,
        intermediate_size=3 * hidden,
        vocab_size=vocabulary,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder
