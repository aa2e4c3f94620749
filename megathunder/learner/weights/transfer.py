"""Weights between a Hugging Face folder and the local shards of a cell, one tensor at a time.

    import   read parts -> merge -> this rank's shard                     every rank, no communication
    export   owners send shards -> leader: unshard -> split -> yield      every rank of the cell, in one order

`export_tensors` moves anything shaped like the parameters (gradients too). On ranks other than the cell's leader the
iterators yield nothing but must be exhausted: that is where they send. Peak memory is one full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megathunder.errors import ConfigError
from megathunder.learner.families.rules import Kind
from megathunder.learner.model import ModelBundle
from megathunder.learner.weights import layouts
from megathunder.learner.weights.hf_files import HfReader, HfWriter, copy_description
from megathunder.learner.weights.local import local_tensors
from megathunder.learner.weights.names import Named, refuse_unnamed, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Part `part` of a parameter, as held by one rank."""

    megatron: str
    part: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def import_weights(bundle: ModelBundle, folder: str | Path) -> None:
    """Fill this rank's stages from `folder`. Raises ConfigError for a missing or misshapen tensor."""
    reader, dims = HfReader(Path(folder)), _dimensions(bundle)
    refuse_unnamed(bundle.family, Path(folder), reader.names, bundle.transformer_config.num_layers)
    for named, tensor in local_tensors(bundle):
        full = layouts.merge(named.kind, [reader.read(name) for name in named.hf], dims)
        piece = layouts.shard(named.kind, full, *_part(bundle, named))
        if piece.shape != tensor.shape:
            raise ConfigError(
                f"{' + '.join(named.hf)} gives {tuple(piece.shape)} where {named.megatron} is {tuple(tensor.shape)}",
                expected="the shapes that config.json implies",
                remedy="check that config.json belongs to these weights",
            )
        tensor.copy_(piece)


def export_weights(bundle: ModelBundle) -> Iterator[tuple[str, Tensor]]:
    """Full Hugging Face tensors (name, tensor), experts one by one, on the cell's leader; see the module."""
    return export_tensors(bundle, lambda tensor: tensor.data)


@torch.no_grad()
def export_tensors(
    bundle: ModelBundle,
    read: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype | None = None,
    buffers: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Like `export_weights`, of `read(parameter)`; `dtype` is what `read` returns if not the parameter's own.

    Gradients: `export_tensors(bundle, lambda p: p.main_grad, dtype=torch.float32, buffers=False)`.
    """
    layout, dims = bundle.layout, _dimensions(bundle)
    mine: dict[str, Tensor] = {}
    for named, tensor in local_tensors(bundle, buffers=buffers):
        mine.setdefault(named.megatron, tensor)
    plan = _plan(bundle, mine, dtype)
    for megatron in sorted(plan, key=lambda name: _order(bundle, name)):
        named = resolve(bundle.family, megatron)
        pieces = []
        for owner, holding in plan[megatron]:
            if owner == layout.rank:
                pieces.append(read(mine[megatron]))
                if not layout.leads_cell:
                    dist.send(pieces[-1].contiguous(), layout.cell_leader)
            elif layout.leads_cell:
                piece = torch.empty(holding.shape, dtype=holding.dtype, device=layout.device)
                dist.recv(piece, owner)
                pieces.append(piece)
        if layout.leads_cell:
            full = layouts.unshard(named.kind, pieces)
            yield from zip(named.hf, layouts.split(named.kind, full, dims), strict=True)


def save_hf(
    bundle: ModelBundle, folder: str | Path, *, dtype: torch.dtype | None = None, file_bytes: int = 5 * 10**9
) -> None:
    """Write a Hugging Face folder from the cell's leader: weights as `dtype` (default: as they are), config, tokenizer.

    Every rank of the cell calls it; a folder that already has weights is overwritten.
    """
    folder = Path(folder)
    writer = HfWriter(folder, file_bytes=file_bytes) if bundle.layout.leads_cell else None
    for name, tensor in export_weights(bundle):
        keep = dtype is None or name.endswith("e_score_correction_bias")  # the router's bias stays float32
        writer.write(name, tensor if keep else tensor.to(dtype))
    if writer is not None:
        writer.close()
        copy_description(bundle.folder, folder, dtype=dtype or bundle.transformer_config.params_dtype)


def _dimensions(bundle: ModelBundle) -> layouts.Dimensions:
    return layouts.Dimensions.of(bundle.hf, bundle.padded_vocab_size)


def _part(bundle: ModelBundle, named: Named) -> tuple[int, int]:
    """(rank, size) of this rank among those that share the parameter."""
    layout = bundle.layout
    if named.kind is Kind.WHOLE:
        return 0, 1
    if named.of_expert:
        return layout.expert_tensor_rank, layout.expert_tensor
    return layout.tensor_rank, layout.tensor


def _plan(
    bundle: ModelBundle, mine: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, list[tuple[int, _Holding]]]:
    """Global name -> (owner, its holding) for each part in order; the lowest rank of several equal holders owns it."""
    holdings = []
    for megatron, tensor in mine.items():
        part, _ = _part(bundle, resolve(bundle.family, megatron))
        holdings.append(_Holding(megatron=megatron, part=part, shape=tuple(tensor.shape), dtype=dtype or tensor.dtype))
    everyone: list[list[_Holding]] = [holdings]
    if len(bundle.layout.cell_ranks) > 1:
        everyone = [[] for _ in bundle.layout.cell_ranks]
        dist.all_gather_object(everyone, holdings, group=bundle.layout.cell_group)
    owners: dict[str, dict[int, tuple[int, _Holding]]] = {}
    for rank, held in zip(bundle.layout.cell_ranks, everyone, strict=True):
        for holding in held:
            owners.setdefault(holding.megatron, {}).setdefault(holding.part, (rank, holding))
    return {name: [parts[i] for i in sorted(parts)] for name, parts in owners.items()}


def _order(bundle: ModelBundle, megatron: str) -> tuple[int, int, tuple[int, ...]]:
    """Embedding, layers from the first, final norm, output layer: the order of a Hugging Face file."""
    pieces = megatron.split(".")
    numbers = tuple(int(p) for p in pieces if p.isdigit())
    pattern = ".".join("{}" if p.isdigit() else p for p in pieces)
    patterns = [r.megatron.replace("{l}", "{}").replace("{e}", "{}") for r in bundle.family.rules]
    rule = patterns.index(pattern)
    is_layer = bool(numbers)
    before_layers = rule == 0
    return (0 if before_layers else 1 if is_layer else 2, numbers[0] if is_layer else 0, (*numbers[1:], rule))
