"""The shape of a model, read from the `config.json` of its Hugging Face folder; no weights, no torch.

Read by the checks (does the layout divide it?), the FLOP ledger and the memory plan. Raises ConfigError where the
folder is not a model's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megathunder.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE or GLM-4.5-MoE. Sizes are elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    """Inner size of a dense layer's gated MLP (0 where no layer is dense)."""
    vocabulary: int
    tied: bool = False
    """Input and output embeddings are one matrix."""
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = -1
    """Layers with a dense MLP; -1: all of them."""
    qk_norm: bool = False
    """A norm of `head_size` on queries and one on keys in each layer."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    max_positions: int = 0
    """Longest sequence the model was made for; 0: unknown."""

    @property
    def moe_layers(self) -> int:
        return 0 if self.dense_layers < 0 else self.layers - self.dense_layers

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def layer_matrices(self) -> int:
        """Weights of all layers, every expert and the routers counted, norms left out."""
        dense = 3 * self.hidden * self.ffn * (self.layers - self.moe_layers)
        expert = 3 * self.hidden * self.expert_ffn * (self.experts + self.shared_experts)
        router = self.hidden * self.experts
        return self.layers * self.attention_parameters + dense + self.moe_layers * (expert + router)

    @property
    def active_layer_matrices(self) -> int:
        """Weights of the layers that one token multiplies with."""
        idle = 3 * self.hidden * self.expert_ffn * (self.experts - self.experts_per_token)
        return self.layer_matrices - self.moe_layers * idle

    @property
    def embedding_parameters(self) -> int:
        """Of one embedding matrix."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, as many as the published model has."""
        vectors = self.layers * (2 * self.hidden + self.layer_vectors) + self.hidden
        return self.layer_matrices + self.embedding_parameters * (1 if self.tied else 2) + vectors

    @property
    def layer_vectors(self) -> int:
        """Of one layer, its two norms left out: head norms and biases."""
        norms = 2 * self.head_size if self.qk_norm else 0
        return norms + (self.head_size * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0)

    @property
    def active_parameters(self) -> int:
        """Weights one token multiplies with: its layers and the output matrix; the input embedding is a look-up."""
        return self.active_layer_matrices + self.embedding_parameters


MADE_BY = {
    "/runs/smollm2": "MEGATHUNDER_SMOLLM2=1 bash tools/setup.sh",
    "/policies/student_large": "bash tools/setup.sh",
    "/policies/student_moe": "bash tools/setup.sh",
}
"""Folders of models that no clone holds."""


class ConfigJson(dict[str, Any]):
    """A parsed config.json; `[key]` raises ConfigError for a key that it does not have."""

    def __init__(self, content: dict[str, Any], file: Path) -> None:
        super().__init__(content)
        self.file = file

    def __missing__(self, key: str) -> Any:
        raise ConfigError(
            f"{self.file} has no {key}",
            expected=f"{key}, as every published model of its architecture has",
            remedy="download config.json again",
        )


def read_config_json(folder: str | Path, setting: str) -> ConfigJson:
    """`config.json` of the model folder that `setting` names. Raises ConfigError for a missing or broken one."""
    path = Path(folder)
    file = path / "config.json"
    remedy = f"set {setting} to a Hugging Face model folder (config.json, tokenizer.json, *.safetensors)"
    if not path.is_dir():
        made_by = next((command for name, command in MADE_BY.items() if str(path.absolute()).endswith(name)), "")
        remedy = f"{made_by} makes it" if made_by else remedy
        raise ConfigError(f"{setting} = {str(folder)!r}: no such folder", expected="a model folder", remedy=remedy)
    if not file.is_file():
        raise ConfigError(f"{setting} = {str(folder)!r} has no config.json", expected="a model folder", remedy=remedy)
    try:
        parsed = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}", expected="valid JSON", remedy="download the folder again") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{file} holds no object", expected="a JSON object", remedy="download the folder again")
    return ConfigJson(parsed, file)


def read_model_shape(folder: str | Path, setting: str = "learner.model") -> ModelShape:
    """The shape of the model in `folder`. Raises ConfigError naming `setting` and the key that is missing."""
    config = read_config_json(folder, setting)

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int):
                return value
        if default is None:
            raise ConfigError(
                f"{folder}/config.json has no {' or '.join(names)}",
                expected="the config.json of a decoder-only transformer (Llama, Qwen3, Qwen3-MoE, GLM-4.5)",
                remedy=f"set {setting} to such a model",
            )
        return default

    heads, hidden, layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers")
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_size=number("head_dim", default=hidden // heads),
        ffn=number("intermediate_size", default=0),
        vocabulary=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=number("num_experts_per_tok", default=0),
        shared_experts=number("n_shared_experts", default=0),
        expert_ffn=number("moe_intermediate_size", default=0),
        dense_layers=_dense_layers(config, layers) if experts else -1,
        qk_norm=bool(config.get("use_qk_norm", str(config.get("model_type", "")).startswith("qwen3"))),
        qkv_bias=bool(config.get("attention_bias", config.get("model_type") == "qwen2")),
        max_positions=number("max_position_embeddings", default=0),
    )


def _dense_layers(config: dict[str, object], layers: int) -> int:
    """GLM counts leading dense layers; Qwen lists them, or makes every n-th layer sparse."""
    first = config.get("first_k_dense_replace")
    if isinstance(first, int):
        return first
    listed = config.get("mlp_only_layers")
    step = config.get("decoder_sparse_step")
    dense = set(listed) if isinstance(listed, list) else set()
    every = step if isinstance(step, int) and step > 0 else 1
    return sum(1 for layer in range(layers) if layer in dense or (layer + 1) % every)
