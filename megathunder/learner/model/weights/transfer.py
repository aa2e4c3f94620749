"""Weights between a Hugging Face folder and the local shards of a cell, one tensor at a time.

    import   read parts -> merge -> this rank's shard                     every rank, no communication
    export   owners send shards -> leader: unshard -> split -> yield      every rank of the cell, in one order

`export_tensors` moves anything shaped like the parameters (gradients too). On ranks other than the cell's leader the
iterators yield nothing but must be exhausted (`gather`). Peak memory is one full parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megathunder.errors import ConfigError
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.weights import layouts
from megathunder.learner.model.weights.gather import gather, part_of
from megathunder.learner.model.weights.hf_files import HfReader, HfWriter, copy_description
from megathunder.learner.model.weights.local import ADAPTER, local_modules, local_tensors
from megathunder.learner.model.weights.names import Named, refuse_unnamed


@torch.no_grad()
def import_weights(bundle: ModelBundle, folder: str | Path) -> None:
    """Fill this rank's stages from `folder`. Raises ConfigError for a missing or misshapen tensor."""
    reader, dims = HfReader(Path(folder)), _dimensions(bundle)
    refuse_unnamed(bundle.family, Path(folder), reader.names, bundle.transformer_config.num_layers)
    for named, tensor in local_tensors(bundle):
        full = layouts.merge(named.kind, [reader.read(name) for name in named.hf], dims)
        piece = layouts.shard(named.kind, full, *part_of(bundle, named))
        if piece.shape != tensor.shape:
            raise ConfigError(
                f"{' + '.join(named.hf)} gives {tuple(piece.shape)} where {named.megatron} is {tuple(tensor.shape)}",
                expected="the shapes that config.json implies",
                remedy="check that config.json belongs to these weights",
            )
        tensor.copy_(piece)


def export_weights(bundle: ModelBundle) -> Iterator[tuple[str, Tensor]]:
    """Full Hugging Face tensors (name, tensor), experts one by one, adapters merged, on the cell's leader."""
    adapters = {m.weight: getattr(m, ADAPTER) for m, _ in local_modules(bundle) if hasattr(m, ADAPTER)}

    def read(tensor: Tensor) -> Tensor:
        adapter = adapters.get(tensor)
        return tensor.data if adapter is None else (tensor.data + adapter.delta()).to(tensor.dtype)

    return export_tensors(bundle, read)


def export_base(bundle: ModelBundle) -> Iterator[tuple[str, Tensor]]:
    """Like `export_weights`, of the frozen weights without their adapters."""
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
    dims = _dimensions(bundle)
    order = partial(_order, bundle)
    held, what = list(local_tensors(bundle, buffers=buffers)), "tensors and buffers" if buffers else "tensors"
    for named, full in gather(bundle, held, read, what=what, dtype=dtype, order=order):
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


def _order(bundle: ModelBundle, named: Named) -> tuple[int, int, tuple[int, ...]]:
    """Embedding, layers from the first, final norm, output layer: the order of a Hugging Face file."""
    pieces = named.megatron.split(".")
    numbers = tuple(int(p) for p in pieces if p.isdigit())
    pattern = ".".join("{}" if p.isdigit() else p for p in pieces)
    patterns = [r.megatron.replace("{l}", "{}").replace("{e}", "{}") for r in bundle.family.rules]
    rule = patterns.index(pattern)
    is_layer = bool(numbers)
    before_layers = rule == 0
    return (0 if before_layers else 1 if is_layer else 2, numbers[0] if is_layer else 0, (*numbers[1:], rule))
