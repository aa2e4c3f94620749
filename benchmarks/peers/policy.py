"""An 11M-parameter Qwen3 with random weights whose completions have the lengths that a workload wants.

One coordinate of the residual stream is a constant that no layer changes, and the output row of a token reads it: that
token's logit is then a number of our choice in every context. The end token's number is fitted on random contexts, so
that it is drawn with the workload's probability. Called by `trl_grpo.py`; the folder serves both trainers.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.peers.workload import Workload

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "policies" / "student"
CONSTANT = 0.5
CONTEXTS, LENGTH = 8, 128  # random contexts that the end token is fitted on
NEVER = 1e-9


def make_policy(folder: Path, workload: Workload) -> None:
    """Write the model and the tokenizer of examples/policies/student to `folder`."""
    torch.manual_seed(workload.seed)
    shape = Qwen3Config.from_pretrained(TOKENIZER)
    shape.update(
        {
            "hidden_size": 320,
            "intermediate_size": 960,
            "num_hidden_layers": 8,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "head_dim": 64,
            "layer_types": ["full_attention"] * 8,
            "tie_word_embeddings": False,
        }
    )
    model = Qwen3ForCausalLM(shape).float().eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        for token in range(8):  # padding and other special tokens
            model.lm_head.weight[token] = 0.0
        fit(model, shape.eos_token_id, workload.end_probability or NEVER)
        fit(model, shape.pad_token_id, NEVER)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, folder / file)


def fit(model: Qwen3ForCausalLM, token: int, probability: float) -> None:
    """Have `token` drawn with `probability` on average over random contexts."""
    row = model.lm_head.weight[token]
    row[:] = 0.0
    contexts = torch.randint(8, model.config.vocab_size, (CONTEXTS, LENGTH))
    states = model.model(input_ids=contexts).last_hidden_state.double()
    logits = states @ model.lm_head.weight.double().T
    logits[..., token] = -math.inf
    others, constant = logits.logsumexp(-1), states[..., 0]
    low, high = -4000.0, 4000.0
    for _ in range(60):
        middle = (low + high) / 2
        drawn = torch.sigmoid(middle * constant - others).mean()
        low, high = (middle, high) if drawn < probability else (low, middle)
    row[0] = low
