"""A random Qwen3 policy of 11M parameters, the size that a laptop trains."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=320,
    intermediate_size=960,
    num_hidden_layers=8,
    num_attention_heads=5,
    num_key_value_heads=5,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    eos_token_id=0,
    pad_token_id=0,
    bos_token_id=None,
)


def write_model(folder: Path) -> Path:
    """Weights and config.json; no tokenizer, since only token ids travel."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(CONFIG).float().save_pretrained(folder)
    return folder
