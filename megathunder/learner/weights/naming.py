"""Names: from a parameter of a local stage to its global name, its rule and its Hugging Face names.

    local    decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight     (stage 1 of 2, expert rank 1 of 2)
    global   decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight
    hf       model.layers.2.mlp.experts.3.gate_proj.weight, ...up_proj.weight

Refuses a parameter that no rule of the family names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megathunder.errors import ConfigError
from megathunder.learner.families.rules import Family, Kind, Rule
from megathunder.learner.model import ModelBundle

_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


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
    layer, expert = _LAYER.search(megatron), _EXPERT.search(megatron)
    numbers = {"l": layer[0] if layer else "", "e": expert[0] if expert else ""}
    pattern = _EXPERT.sub("{e}", _LAYER.sub("{l}", megatron))
    found: Rule | None = next((r for r in family.rules if r.megatron == pattern), None)
    if found is None:
        raise ConfigError(
            f"no weight rule of {family.architecture} names {pattern}",
            expected="a rule for every parameter of the model",
            remedy=f"add it to megathunder/learner/families/ ({family.model_type})",
        )
    return Named(megatron=megatron, kind=found.kind, hf=tuple(name.format(**numbers) for name in found.hf))


def unnamed(family: Family, stored: Iterable[str], layers: int) -> list[str]:
    """Stored Hugging Face tensors that no rule names; rotary tables and layers past the last (heads) aside."""
    patterns = [re.escape(name) for rule in family.rules for name in rule.hf]
    patterns += [r"model\.layers\.\{l\}\.mlp\.experts\.(gate_up_proj|down_proj)", r".*rotary_emb\.inv_freq"]
    known = re.compile("|".join(p.replace(r"\{l\}", r"\d+").replace(r"\{e\}", r"\d+") for p in patterns))
    beyond = re.compile(r"model\.layers\.(\d+)\.")
    return [
        name
        for name in stored
        if not known.fullmatch(name) and not ((match := beyond.match(name)) and int(match[1]) >= layers)
    ]


def local_tensors(bundle: ModelBundle, *, buffers: bool = True) -> Iterator[tuple[Named, Tensor]]:
    """This rank's parameters (and the router's bias, a buffer) with their global names, stage by stage.

    A tied output layer of the last pipeline stage comes under the embedding's name.
    """
    for stage in bundle.stages:
        for local, tensor in _stage_tensors(stage, buffers):
            name = global_name(stage, local, bundle)
            if name == OUTPUT and bundle.tied:
                name = EMBEDDING
            yield resolve(bundle.family, name), tensor


def _stage_tensors(stage: GPTModel, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    yield from stage.named_parameters()
    if buffers:
        yield from ((n, b) for n, b in stage.named_buffers() if n.endswith("router.expert_bias"))


def global_name(stage: GPTModel, local: str, bundle: ModelBundle) -> str:
    """Layer and expert numbers counted over the whole model."""
    layer = _LAYER.search(local)
    if layer is None:
        return local
    number = stage.decoder.layers[int(layer[0])].layer_number - 1
    per_rank = (bundle.transformer_config.num_moe_experts or 0) // bundle.layout.expert
    first = bundle.layout.expert_rank * per_rank
    return _EXPERT.sub(lambda m: str(first + int(m[0])), _LAYER.sub(str(number), local))
