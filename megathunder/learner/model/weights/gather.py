"""Collects sharded tensors of a cell on its leader, one at a time.

    plan     every rank tells what it holds: name, part, shape           one small collective, the first time
    gather   owners of the parts send, the leader receives and unshards  point to point, in one order

Every rank of the cell must exhaust the iterator: that is where it sends. Called by `transfer` and `adapter_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.families.rules import Kind
from megathunder.learner.model.weights import layouts
from megathunder.learner.model.weights.names import Named


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Part `part` of a tensor, as held by one rank."""

    named: Named
    part: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@torch.no_grad()
def gather(
    bundle: ModelBundle,
    held: list[tuple[Named, Tensor]],
    read: Callable[[Tensor], Tensor],
    *,
    what: str,
    dtype: torch.dtype | None = None,
    order: Callable[[Named], object] | None = None,
) -> Iterator[tuple[Named, Tensor]]:
    """(name, full tensor of `read`) on the cell's leader, nothing elsewhere; `dtype` is that of `read`'s answer. `what`
    names the set of tensors, the same on every rank and for every call with that set."""
    layout = bundle.layout
    mine: dict[str, Tensor] = {}
    for named, tensor in held:
        mine.setdefault(named.megatron, tensor)
    key = f"{what} {dtype}"
    if key not in bundle.plans:
        bundle.plans[key] = _plan(bundle, held, dtype)
    plan = bundle.plans[key]
    names = sorted(plan, key=lambda name: order(plan[name][0][1].named)) if order else list(plan)
    for megatron in names:
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
            named = plan[megatron][0][1].named
            yield named, layouts.unshard(named.kind, pieces)


def part_of(bundle: ModelBundle, named: Named) -> tuple[int, int]:
    """(rank, size) of this rank among those that share the tensor."""
    layout = bundle.layout
    if named.kind is Kind.WHOLE:
        return 0, 1
    if named.of_expert:
        return layout.expert_tensor_rank, layout.expert_tensor
    return layout.tensor_rank, layout.tensor


def _plan(
    bundle: ModelBundle, held: list[tuple[Named, Tensor]], dtype: torch.dtype | None
) -> dict[str, list[tuple[int, _Holding]]]:
    """Name -> (owner, its holding) for each part in order; the lowest rank of several equal holders owns it."""
    holdings = [
        _Holding(named=named, part=part_of(bundle, named)[0], shape=tuple(tensor.shape), dtype=dtype or tensor.dtype)
        for named, tensor in held
    ]
    everyone: list[list[_Holding]] = [holdings]
    if len(bundle.layout.cell_ranks) > 1:
        everyone = [[] for _ in bundle.layout.cell_ranks]
        dist.all_gather_object(everyone, holdings, group=bundle.layout.cell_group)
    owners: dict[str, dict[int, tuple[int, _Holding]]] = {}
    for rank, theirs in zip(bundle.layout.cell_ranks, everyone, strict=True):
        for holding in theirs:
            owners.setdefault(holding.named.megatron, {}).setdefault(holding.part, (rank, holding))
    return {name: [parts[i] for i in sorted(parts)] for name, parts in owners.items()}
