"""Compares a model in its layout with transformers on the same folder: logits and every parameter gradient.

    rows -> packed micro-batch -> Megatron logits [T, V]               against   transformers' logits of each row alone
    loss = sum over rows and tokens of -log pi(next token)             gradients brought to Hugging Face names by export

Called by tools/parity.py and the equality tests, in every rank of one cell; the leader holds the reference and answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy
from torch import Tensor

from benchmarks.parity.transformers_reference import Reference, Rows
from megathunder.learner.model.adapter_files import adapter_tensors, export_adapter
from megathunder.learner.model.attention import AttentionContext, RowSpan
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.weights import export_tensors, export_weights, layouts
from megathunder.learner.model.weights.gather import part_of
from megathunder.learner.model.weights.hf_files import FusedPart, HfReader

_ROW_LENGTHS = (11, 5, 8, 1, 6)  # 31 tokens: sequence parallelism must pad


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Largest absolute difference of a logit; largest over parameters of max |dg| / max |g|; and whether every
    exported tensor has the bits, the shape and the name it was imported with."""

    logits: float
    gradients: float
    worst_parameter: str
    round_trip: bool


def sample_rows(vocab_size: int) -> list[list[int]]:
    """A few rows of different lengths, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in _ROW_LENGTHS]


def compare(bundle: ModelBundle, rows: Rows | None = None) -> Differences | None:
    """Differences from transformers on the leader of the cell, None elsewhere; every rank of the cell calls it.

    A model with adapters is compared with the merged model: dB = (alpha / r) dW A^T and dA = (alpha / r) B^T dW.
    """
    rows = rows or sample_rows(bundle.vocab_size)
    if bundle.adapted:
        fill_adapters(bundle)
    logits, gradients = forward_backward(bundle, rows)
    exported = {name: gradient.clone() for name, gradient in gradients}
    weights = {name: tensor.cpu().clone() for name, tensor in export_weights(bundle)}
    adapters = {name: tensor.cpu().clone() for name, tensor in export_adapter(bundle)}
    if not bundle.layout.leads_cell:
        return None
    reference = Reference(bundle.folder, bundle.transformer_config.params_dtype)
    round_trip = bundle.adapted or _same_as_folder(bundle, weights)
    if bundle.adapted:
        reference.load(weights)
    wanted = reference.logits(rows)
    got = logits[: wanted.shape[0], : bundle.vocab_size].cpu()
    worst, relative = "", 0.0
    for name, gradient in exported.items():
        expected = reference.gradient(name) if name not in adapters else _of_adapter(bundle, reference, adapters, name)
        scale = expected.abs().max().clamp_min(1e-12)
        difference = float((gradient.cpu() - expected).abs().max() / scale)
        if difference >= relative:
            worst, relative = name, difference
    return Differences(
        logits=float((got - wanted).abs().max()), gradients=relative, worst_parameter=worst, round_trip=round_trip
    )


def fill_adapters(bundle: ModelBundle) -> None:
    """Give every B values, the same whole matrix in every layout, so that both gradients of a pair are tested."""
    for named, tensor in adapter_tensors(bundle):
        if ".lora_B." in named.hf[0]:
            _, sharers = part_of(bundle, named)
            generator = torch.Generator().manual_seed(len(named.hf[0]) + sum(map(ord, named.hf[0])))
            whole = torch.randn(tensor.shape[0] * sharers, tensor.shape[1], generator=generator) * 0.1
            tensor.data.copy_(layouts.shard(named.kind, whole, *part_of(bundle, named)))


def _of_adapter(bundle: ModelBundle, reference: Reference, adapters: dict[str, Tensor], name: str) -> Tensor:
    layer, side = name.removeprefix("base_model.model.").removesuffix(".weight").split(".lora_")
    whole = reference.gradient(f"{layer}.weight") * bundle.adapter_scale
    a, b = (adapters[f"base_model.model.{layer}.lora_{s}.weight"] for s in "AB")
    return whole @ a.T if side == "B" else b.T @ whole


def forward_backward(bundle: ModelBundle, rows: Rows) -> tuple[Tensor, Iterator[tuple[str, Tensor]]]:
    """One packed micro-batch through Megatron's schedule (any pipeline): logits [T, V] and gradients by HF name."""
    layout, config = bundle.layout, bundle.transformer_config
    context = AttentionContext.of([RowSpan(length=len(row)) for row in rows], layout.device, pad_to=bundle.pad_to)
    tokens = torch.zeros(1, context.tokens, dtype=torch.int64, device=layout.device)
    targets, weights = tokens.clone(), torch.zeros(1, context.tokens, device=layout.device)
    for start, row in zip(context.row_starts, rows, strict=False):
        tokens[0, start : start + len(row)] = torch.tensor(row)
        targets[0, start : start + len(row) - 1] = torch.tensor(row[1:])
        weights[0, start : start + len(row) - 1] = 1.0
    seen: list[Tensor] = []

    def loss(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        seen.append(logits.detach())
        # The fused cross entropy writes into its argument.
        losses = vocab_parallel_cross_entropy(logits.clone().transpose(0, 1), targets.transpose(0, 1))
        total = (losses * weights.transpose(0, 1)).sum()
        return total, {"loss": total.detach().clone()}

    def step(data: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
        output = model(tokens, context.position_ids[None], None, packed_seq_params=context)
        return output, loss

    models = [_with_gradient_buffers(bundle, stage, first=i == 0) for i, stage in enumerate(bundle.stages)]
    chunks = len(models)
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(())] * chunks if chunks > 1 else iter(()),
        model=models if chunks > 1 else models[0],
        num_microbatches=1 if chunks == 1 else layout.pipeline,
        seq_length=context.tokens,
        micro_batch_size=1,
        forward_only=False,
    )
    finalize_model_grads(models)
    dtype = torch.float64 if config.params_dtype is torch.float64 else torch.float32
    export = export_adapter if bundle.adapted else partial(export_tensors, buffers=False)
    gradients = export(bundle, lambda p: p.main_grad, dtype=dtype)
    return _gather_logits(bundle, seen, context.tokens), gradients


def _with_gradient_buffers(bundle: ModelBundle, stage: torch.nn.Module, *, first: bool) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(bundle.transformer_config, config, stage, disable_bucketing=not first)
    model.zero_grad_buffer()
    return model


def _gather_logits(bundle: ModelBundle, seen: list[Tensor], tokens: int) -> Tensor:
    """Full logits [T, V] on every rank of the pipeline group."""
    layout = bundle.layout
    full = torch.empty(tokens, bundle.padded_vocab_size, dtype=bundle.transformer_config.params_dtype)
    full = full.to(layout.device)
    if seen:
        full = gather_from_tensor_model_parallel_region(seen[0])[0].contiguous()
    if layout.pipeline > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(full, last, group=parallel_state.get_pipeline_model_parallel_group())
    return full


def _same_as_folder(bundle: ModelBundle, weights: dict[str, Tensor]) -> bool:
    reader = HfReader(bundle.folder)
    stored = {name: reader.read(name) for name in weights}
    same = all(stored[n].shape == t.shape and torch.equal(stored[n].to(t.dtype), t) for n, t in weights.items())
    names = {name for name in reader.names if not (bundle.tied and name == "lm_head.weight")}
    fused = {FusedPart.named(name).stored for name in weights if name not in names}
    return same and names <= weights.keys() | fused
