"""A random Qwen3 model of 0.1M parameters as a Hugging Face folder, and its log-probabilities by transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 256


def make_model(folder: Path, seed: int = 0) -> Qwen3ForCausalLM:
    """Write a model to `folder` (weights and config; no tokenizer, since only token ids travel)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def logprobs(model: Qwen3ForCausalLM, token_ids: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """log pi(token_ids[t] | token_ids[:t]) at `temperature` for t = 1..T-1."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    rows = torch.log_softmax(logits / temperature, dim=-1)
    return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def largest_difference(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b))
