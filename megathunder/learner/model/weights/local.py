"""The parameters that this rank holds, under the names they have in the whole model.

local    decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight     (stage 1 of 2, expert rank 1 of 2)
whole    decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.layers import LINEAR
from megathunder.learner.model.weights.names import EMBEDDING, EXPERT, LAYER, OUTPUT, Named, canonical, resolve

ADAPTER = "lora"  # child of a linear layer that holds its low-rank adapter


def local_tensors(bundle: ModelBundle, *, buffers: bool = True) -> Iterator[tuple[Named, Tensor]]:
    """This rank's parameters (and the router's bias, a buffer) with their global names, stage by stage; no adapters.

    A tied output layer of the last pipeline stage comes under the embedding's name.
    """
    for stage in bundle.stages:
        for local, tensor in _stage_tensors(stage, buffers):
            name = global_name(stage, local, bundle)
            if name == OUTPUT and bundle.tied:
                name = EMBEDDING
            yield resolve(bundle.family, name), tensor


def local_modules(bundle: ModelBundle) -> Iterator[tuple[torch.nn.Module, Named]]:
    """This rank's linear layers inside transformer layers, with the global name of their weight."""
    for stage in bundle.stages:
        for local, module in stage.named_modules():
            if isinstance(module, LINEAR) and LAYER.search(local):
                yield module, resolve(bundle.family, global_name(stage, f"{local}.weight", bundle))


def _stage_tensors(stage: GPTModel, buffers: bool) -> Iterator[tuple[str, Tensor]]:
    yield from ((n, p) for n, p in stage.named_parameters() if f".{ADAPTER}." not in n)
    if buffers:
        yield from ((n, b) for n, b in stage.named_buffers() if n.endswith("router.expert_bias"))


def global_name(stage: GPTModel, local: str, bundle: ModelBundle) -> str:
    """Layer and expert numbers counted over the whole model, in the names of Megatron-Core's own layers."""
    local = canonical(local)
    layer = LAYER.search(local)
    if layer is None:
        return local
    number = stage.decoder.layers[int(layer[0])].layer_number - 1
    per_rank = (bundle.transformer_config.num_moe_experts or 0) // bundle.layout.expert
    first = bundle.layout.expert_rank * per_rank
    return EXPERT.sub(lambda m: str(first + int(m[0])), LAYER.sub(str(number), local))
