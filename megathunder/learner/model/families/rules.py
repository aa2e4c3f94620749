"""What a model family is: settings and a table of weight rules, read in both directions.

A rule names one Megatron parameter, the Hugging Face tensors it is made of, and how:

    kind        Megatron tensor (full)              sharded over tensor-parallel ranks
    WHOLE       the tensor                          not at all
    COLUMN      the tensor                          dimension 0
    ROW         the tensor                          dimension 1
    QKV         per KV group [q x rep; k; v]        dimension 0
    GATE_UP     [gate; up]                          [gate_r; up_r] a rank
    VOCAB       the tensor, padded with zero rows   dimension 0

`{l}` is the layer, `{e}` the expert, both counted over the whole model. A rule with `{e}` is sharded over expert-tensor
ranks and owned by one expert-parallel rank. Rules whose tensors a model does not have (a bias, a dense MLP in an expert
layer) are not used: the built model decides which parameters there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megathunder.errors import ConfigError

ROPE_TYPES = ("default", "llama3")


class Kind(Enum):
    """How Hugging Face tensors form a Megatron parameter; see the table above."""

    WHOLE = "whole"
    COLUMN = "column"
    ROW = "row"
    QKV = "qkv"
    GATE_UP = "gate_up"
    VOCAB = "vocab"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`megatron` is a parameter's name in GPTModel, `hf` the names of its parts, in order."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. `settings` maps config.json to TransformerConfig fields; `models` names published ones."""

    architecture: str
    models: str
    model_type: str
    settings: Callable[[dict[str, Any]], dict[str, Any]]
    rules: tuple[Rule, ...]

    @property
    def mixture(self) -> bool:
        """A mixture of experts."""
        return any("{e}" in rule.megatron for rule in self.rules)

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Hugging Face names of the layers that may carry an adapter: `q_proj`, ..., `down_proj`."""
        kinds = (Kind.QKV, Kind.GATE_UP, Kind.ROW)
        names = (name for rule in self.rules if rule.kind in kinds for name in rule.hf if name.endswith(".weight"))
        return tuple(dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names))


def rule(megatron: str, kind: Kind, *hf: str) -> Rule:
    """Short form for tables; a leading `L.` stands for the layer's prefix on both sides."""
    return Rule(
        megatron=megatron.replace("L.", "decoder.layers.{l}.", 1) if megatron.startswith("L.") else megatron,
        hf=tuple(name.replace("L.", "model.layers.{l}.", 1) if name.startswith("L.") else name for name in hf),
        kind=kind,
    )


ATTENTION = (
    rule("embedding.word_embeddings.weight", Kind.VOCAB, "model.embed_tokens.weight"),
    rule("L.input_layernorm.weight", Kind.WHOLE, "L.input_layernorm.weight"),
    rule(
        "L.self_attention.linear_qkv.weight",
        Kind.QKV,
        "L.self_attn.q_proj.weight",
        "L.self_attn.k_proj.weight",
        "L.self_attn.v_proj.weight",
    ),
    rule(
        "L.self_attention.linear_qkv.bias",
        Kind.QKV,
        "L.self_attn.q_proj.bias",
        "L.self_attn.k_proj.bias",
        "L.self_attn.v_proj.bias",
    ),
    rule("L.self_attention.q_layernorm.weight", Kind.WHOLE, "L.self_attn.q_norm.weight"),
    rule("L.self_attention.k_layernorm.weight", Kind.WHOLE, "L.self_attn.k_norm.weight"),
    rule("L.self_attention.linear_proj.weight", Kind.ROW, "L.self_attn.o_proj.weight"),
    rule("L.pre_mlp_layernorm.weight", Kind.WHOLE, "L.post_attention_layernorm.weight"),
)

DENSE_MLP = (
    rule("L.mlp.linear_fc1.weight", Kind.GATE_UP, "L.mlp.gate_proj.weight", "L.mlp.up_proj.weight"),
    rule("L.mlp.linear_fc2.weight", Kind.ROW, "L.mlp.down_proj.weight"),
)

EXPERT_MLP = (
    rule("L.mlp.router.weight", Kind.WHOLE, "L.mlp.gate.weight"),
    rule("L.mlp.router.expert_bias", Kind.WHOLE, "L.mlp.gate.e_score_correction_bias"),
    rule(
        "L.mlp.experts.local_experts.{e}.linear_fc1.weight",
        Kind.GATE_UP,
        "L.mlp.experts.{e}.gate_proj.weight",
        "L.mlp.experts.{e}.up_proj.weight",
    ),
    rule("L.mlp.experts.local_experts.{e}.linear_fc2.weight", Kind.ROW, "L.mlp.experts.{e}.down_proj.weight"),
    rule(
        "L.mlp.shared_experts.linear_fc1.weight",
        Kind.GATE_UP,
        "L.mlp.shared_experts.gate_proj.weight",
        "L.mlp.shared_experts.up_proj.weight",
    ),
    rule("L.mlp.shared_experts.linear_fc2.weight", Kind.ROW, "L.mlp.shared_experts.down_proj.weight"),
)

HEAD = (
    rule("decoder.final_layernorm.weight", Kind.WHOLE, "model.norm.weight"),
    rule("output_layer.weight", Kind.VOCAB, "lm_head.weight"),
)


def dense_settings(hf: dict[str, Any]) -> dict[str, Any]:
    """TransformerConfig fields that every family here reads the same way."""
    rope_parameters(hf)
    heads = hf["num_attention_heads"]
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "kv_channels": head_dimensions(hf),
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "add_qkv_bias": bool(hf.get("attention_bias", False)),
    }


def head_dimensions(hf: dict[str, Any]) -> int:
    """Dimensions of one attention head."""
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def rope_parameters(hf: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings of both spellings, `rope_parameters` (newer) and `rope_theta` with `rope_scaling`.

    Raises ConfigError for a kind of scaling other than llama3.
    """
    parameters = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"rope_type {kind!r} in config.json",
            expected=" or ".join(ROPE_TYPES),
            remedy="use a model of one of these kinds",
        )
    return {
        "rope_theta": hf.get("rope_theta", 10000.0),
        "partial_rotary_factor": hf.get("partial_rotary_factor", 1),
        **parameters,
        "rope_type": kind,
    }
