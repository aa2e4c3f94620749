"""Low-rank adapters on Megatron's linear layers; the model they sit on is frozen.

    y = W x + (alpha / r) B A x        A [r, in], B [out, r], B = 0 at the start        (LoRA, Hu et al. 2021)

One adapter for each Hugging Face layer named in `lora_targets`, so a fused Megatron layer (q, k, v; gate, up) carries
several, and what is trained is a PEFT adapter without conversion. How the pair is sharded follows the layer's kind:

    kind              A                      B                     what the middle h = A x needs
    QKV, GATE_UP      on every rank          sharded, dimension 0  backward sums dh over ranks
    ROW               sharded, dimension 1   on every rank         forward sums h over ranks
    of an expert      nothing: the dispatcher sums the outputs; the replicated matrix's gradient is summed at the step

Attached as a child module and a forward hook, so every other name of the model stays; the layer's part of a checkpoint
names the adapter's shards. Called by `model.build_model`; `export_weights` merges adapters, `adapter_files` reads and
writes them. Refuses targets that the model does not have.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model import low_rank
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.families.rules import Kind
from megathunder.learner.model.weights import layouts
from megathunder.learner.model.weights.local import ADAPTER, local_modules
from megathunder.learner.model.weights.names import Named


class Adapter(torch.nn.Module):
    """Adapters of one Megatron layer. `parts` are the Hugging Face layers (without `.weight`) in the layer's order;
    those that are not targets contribute zero."""

    def __init__(
        self, linear: torch.nn.Module, named: Named, bundle: ModelBundle, config: LearnerConfig, *, seed: int
    ) -> None:
        super().__init__()
        layout = bundle.layout
        self.kind, self.rank = named.kind, config.lora_rank
        self.scale = config.lora_alpha / config.lora_rank
        self.row = named.kind is Kind.ROW
        self.sharers = layout.expert_tensor if named.of_expert else layout.tensor
        self.communicates = self.sharers > 1 and not named.of_expert
        self.sequence = self.communicates and bundle.transformer_config.sequence_parallel
        self.partial = self.sequence or (named.of_expert and self.sharers > 1)
        self.dims = layouts.Dimensions.of_rank(bundle.hf, self.sharers)
        self.parts = tuple(name.removesuffix(".weight") for name in named.hf)
        self.targets = tuple(part for part in self.parts if part.rpartition(".")[2] in config.lora_targets)
        rank = layout.expert_tensor_rank if named.of_expert else layout.tensor_rank
        # Rows of B that each part has on this rank: the layer's rows, undone into its parts.
        rows = torch.empty(linear.weight.shape[0], 1, device="meta")
        heights = {p: t.shape[0] for p, t in zip(self.parts, layouts.split(self.kind, rows, self.dims), strict=True)}
        self.heights = heights
        width = linear.weight.shape[1]
        for part in self.targets:
            full_width = width * (self.sharers if self.row else 1)
            a = _initial(part, self.rank, full_width, seed)
            a = a.chunk(self.sharers, dim=1)[rank] if self.row else a
            b = torch.zeros(heights[part], self.rank)
            self.register_parameter(_key("a", part), self._parameter(a, linear.weight, sharded=self.row, dimension=1))
            self.register_parameter(
                _key("b", part), self._parameter(b, linear.weight, sharded=not self.row, dimension=0)
            )

    def _parameter(self, value: Tensor, like: Tensor, *, sharded: bool, dimension: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(value.to(like.device, like.dtype).contiguous())
        set_tensor_model_parallel_attributes(parameter, sharded and self.sharers > 1, dimension, 1)
        parameter.allreduce = getattr(like, "allreduce", True)  # False: reduced over expert-data-parallel ranks
        # The replicated one then sees its rank's part only; Megatron sums gradients so marked over tensor ranks.
        parameter.sequence_parallel = self.partial and not sharded
        return parameter

    def a(self, part: str) -> Tensor:
        """A [r, in] of one part, this rank's columns."""
        return getattr(self, _key("a", part))

    def b(self, part: str) -> Tensor:
        """B [out, r] of one part, this rank's rows."""
        return getattr(self, _key("b", part))

    def forward(self, x: Tensor) -> Tensor:
        """The scaled sum to add to the layer's output, x [..., in] -> [..., out]."""
        outputs = []
        for part in self.parts:
            if part in self.targets:
                middle = self._exchange(F.linear(x, self.a(part)))
                outputs.append(F.linear(middle, self.b(part)) * self.scale)
            else:
                outputs.append(x.new_zeros(*self._shape(outputs, x), self.heights[part]))
        if len(outputs) == 1:
            return outputs[0]
        features_first = [o.movedim(-1, 0) for o in outputs]
        return layouts.merge(self.kind, features_first, self.dims).movedim(0, -1)

    @property
    def shard_axes(self) -> dict[str, int]:
        """Attribute -> dimension, of the matrices that tensor ranks share out."""
        side, dimension = ("a", 1) if self.row else ("b", 0)
        return {_key(side, part): dimension for part in self.targets}

    def delta(self) -> Tensor:
        """(alpha / r) B A in the layer's own layout, this rank's part of its weight; at least float32 (`low_rank`)."""
        products = {p: low_rank.product(self.b(p), self.a(p), self.scale) for p in self.targets}
        like = products[self.targets[0]]
        absent = {p: like.new_zeros(height, like.shape[1]) for p, height in self.heights.items() if p not in products}
        return layouts.merge(self.kind, [(products | absent)[p] for p in self.heights], self.dims)

    def _shape(self, outputs: list[Tensor], x: Tensor) -> tuple[int, ...]:
        if outputs:
            return tuple(outputs[0].shape[:-1])
        length = x.shape[0] * (self.sharers if self.sequence and not self.row else 1)
        return (length, *x.shape[1:-1])

    def _exchange(self, middle: Tensor) -> Tensor:
        if not self.communicates:
            return middle
        if self.row:
            exchange = reduce_scatter_to_sequence_parallel_region if self.sequence else None
            return (exchange or reduce_from_tensor_model_parallel_region)(middle)
        exchange = gather_from_sequence_parallel_region if self.sequence else copy_to_tensor_model_parallel_region
        return exchange(middle)


def attach_lora(bundle: ModelBundle, config: LearnerConfig, *, seed: int = 0) -> None:
    """Freeze the model and put adapters on its layers. Raises ConfigError for targets that no layer has."""
    if config.lora_rank < 1:
        raise ConfigError(
            f"learner.lora_rank is {config.lora_rank}", expected="1 or more", remedy="set learner.lora_rank, say 16"
        )
    bundle.adapter_scale = config.lora_alpha / config.lora_rank
    for stage in bundle.stages:
        stage.requires_grad_(False)
        if stage.pre_process:
            # Recomputation finds nothing to differentiate unless its input asks for a gradient.
            stage.embedding.register_forward_hook(lambda module, inputs, out: out.detach().requires_grad_(True))
    reached: set[str] = set()
    for linear, named in local_modules(bundle):
        here = {name.removesuffix(".weight").rpartition(".")[2] for name in named.hf} & set(config.lora_targets)
        if not here or named.kind not in (Kind.QKV, Kind.GATE_UP, Kind.ROW):
            continue
        if named.of_expert and bundle.layout.expert_tensor not in (1, bundle.layout.tensor):
            raise ConfigError(
                f"adapters on experts with expert_tensor_parallel {bundle.layout.expert_tensor}",
                expected=f"1 or learner.tensor_parallel ({bundle.layout.tensor})",
                remedy="set learner.expert_tensor_parallel to one of these",
            )
        adapter = Adapter(linear, named, bundle, config, seed=seed)
        linear.add_module(ADAPTER, adapter)
        linear.register_forward_hook(_add)
        linear.sharded_state_dict = partial(_sharded_state, linear, linear.sharded_state_dict)
        reached |= here
    missing = set(config.lora_targets) - reached
    if missing and bundle.layout.pipeline == 1:
        known = sorted({n.removesuffix(".weight").rpartition(".")[2] for _, m in local_modules(bundle) for n in m.hf})
        raise ConfigError(
            f"learner.lora_targets names {', '.join(sorted(missing))}, which the model has not",
            expected=f"some of {', '.join(known)}",
            remedy="correct learner.lora_targets",
        )


def _add(linear: torch.nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return output[0] + getattr(linear, ADAPTER)(inputs[0]), output[1]


def _sharded_state(
    linear: torch.nn.Module,
    own: Callable[..., dict[str, Any]],
    prefix: str = "",
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Megatron's checkpoint entries of the layer; `own` takes an unknown child for replicated over tensor ranks."""
    adapter, inside = getattr(linear, ADAPTER), f"{prefix}{ADAPTER}."
    entries = own(prefix, sharded_offsets, metadata)
    return {name: entry for name, entry in entries.items() if not name.startswith(inside)} | (
        make_sharded_tensors_for_checkpoint(
            adapter.state_dict(keep_vars=True),
            inside,
            adapter.shard_axes,
            sharded_offsets,
            tp_group=getattr(linear, "_tp_group", None)
            or linear.tp_group,  # Transformer Engine's own is None for experts
            dp_cp_group=metadata["dp_cp_group"],
        )
    )


def _key(which: str, part: str) -> str:
    """Attribute of one matrix: `a_q_proj`."""
    return f"{which}_{part.rpartition('.')[2]}"


def _initial(part: str, rank: int, width: int, seed: int) -> Tensor:
    """A [r, in], uniform as PEFT's; drawn whole from the layer's name, so every layout starts from the same adapter."""
    digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = math.sqrt(3.0) * math.sqrt(2.0 / 6.0) / math.sqrt(width)  # kaiming_uniform_(a=sqrt(5))
    return (torch.rand(rank, width, generator=generator) * 2 - 1) * bound
