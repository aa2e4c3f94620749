"""Names of parameters over the whole model: the rule of a Megatron name and its Hugging Face names.

    megatron  decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight
    hf        model.layers.2.mlp.experts.3.gate_proj.weight, model.layers.2.mlp.experts.3.up_proj.weight

Refuses a Megatron parameter, or a stored tensor, that no rule of the family names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import Family, Kind, Rule

LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


_VARIANTS = (
    (re.compile(r"\.self_attention\.linear_qkv\.layer_norm_weight$"), ".input_layernorm.weight"),
    (re.compile(r"\.mlp\.linear_fc1\.layer_norm_weight$"), ".pre_mlp_layernorm.weight"),
    (re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r".mlp.experts.local_experts.\2.\1.weight"),
)
"""Transformer Engine's name -> that of Megatron-Core's own layers: norms fused with the layer behind, experts."""


def canonical(megatron: str) -> str:
    """The name a parameter has in Megatron-Core's own layers, whichever layers hold it."""
    for pattern, name in _VARIANTS:
        megatron = pattern.sub(name, megatron)
    return megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One Megatron parameter: its global name, its layout and the Hugging Face names of its parts."""

    megatron: str
    kind: Kind
    hf: tuple[str, ...]

    @property
    def of_expert(self) -> bool:
        """Whether it belongs to one routed expert (sharded over expert-tensor ranks)."""
        return ".local_experts." in self.megatron


def resolve(family: Family, megatron: str) -> Named:
    """The rule of a global name, with its numbers filled in."""
    layer, expert = LAYER.search(megatron), EXPERT.search(megatron)
    numbers = {"l": layer[0] if layer else "", "e": expert[0] if expert else ""}
    pattern = EXPERT.sub("{e}", LAYER.sub("{l}", megatron))
    found: Rule | None = next((r for r in family.rules if r.megatron == pattern), None)
    if found is None:
        raise ConfigError(
            f"no weight rule of {family.architecture} names {pattern}",
            expected="a rule for every parameter of the model",
            remedy=f"add it to megathunder/learner/model/families/ ({family.model_type})",
        )
    return Named(megatron=megatron, kind=found.kind, hf=tuple(name.format(**numbers) for name in found.hf))


def refuse_unnamed(family: Family, folder: Path, stored: Iterable[str], layers: int) -> None:
    """Raise ConfigError for stored tensors that no rule names; rotary tables and layers past the last (heads) aside."""
    patterns = [re.escape(name) for rule in family.rules for name in rule.hf]
    patterns += [r"model\.layers\.\{l\}\.mlp\.experts\.(gate_up_proj|down_proj)", r".*rotary_emb\.inv_freq"]
    known = re.compile("|".join(p.replace(r"\{l\}", r"\d+").replace(r"\{e\}", r"\d+") for p in patterns))
    layer = re.compile(r"model\.layers\.(\d+)\.")
    extra = [
        name
        for name in stored
        if not known.fullmatch(name) and not ((match := layer.match(name)) and int(match[1]) >= layers)
    ]
    if extra:
        raise ConfigError(
            f"{folder} has {len(extra)} tensors that no rule names, the first {extra[0]}",
            expected=f"only tensors of {family.architecture}",
            remedy="check config.json's architecture, or add a rule to megathunder/learner/model/families/",
        )
