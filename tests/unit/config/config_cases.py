"""A legal configuration on tiny model folders, and a way to change one setting by its dotted name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from megathunder.config import Config

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "vocab_size": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
"""What makes SHAPE a mixture of experts."""


def safetensors(**data_bytes: int) -> bytes:
    """A safetensors file of uint8 tensors of these sizes, all zero."""
    header, start = {}, 0
    for name, size in data_bytes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(start)


def model_folder(path: Path, tokens: tuple[str, ...] = ("a", "b"), **changes: object) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**SHAPE, **changes}))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    added = [{"content": "<eos>", "id": len(tokens)}]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    (path / "model.safetensors").write_bytes(safetensors())
    return str(path)


def change(config: Config, **settings: object) -> Config:
    """`change(config, run__group_size=1, objective="opd")`."""
    for dotted, value in settings.items():
        section, _, key = dotted.partition("__")
        changed = dataclasses.replace(getattr(config, section), **{key: value}) if key else value
        config = dataclasses.replace(config, **{section: changed})
    return config


def legal(folder: Path) -> Config:
    return change(
        Config(),
        run__folder=str(folder / "runs"),
        learner__model=model_folder(folder / "student"),
        opd__teacher=model_folder(folder / "teacher"),
    )
