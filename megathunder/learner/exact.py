"""The reduction of exact accumulators: integers are summed over ranks, then become floats once.

Integer sums are the same for every order and every assignment of contributions to ranks, so every rank's buffers hold
the same bits whatever the schedule was. Called by `learner.take_step`. Refuses layouts whose ranks share parameters
(their gradients would have to be added in floating point).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megathunder.learner.accumulators.arithmetic import FixedPointArithmetic
from megathunder.learner.accumulators.store import AccumulatorStore


def reduce_exactly(
    chunks: Sequence[DistributedDataParallel], store: AccumulatorStore, arithmetic: FixedPointArithmetic
) -> None:
    """Sum the batch's integers over data-parallel ranks and write the sum into Megatron's buffers."""
    groups: list[dist.ProcessGroup] = []
    for chunk in chunks:
        groups += [chunk.dp_cp_group] * len(chunk.buffers)
        groups += [chunk.expt_dp_group] * len(chunk.expert_parallel_buffers)
    bounds: list[int] = []
    for flat, bound, group in zip(store.batch.flats, store.batch.bounds, groups, strict=True):
        everyone: list[int | None] = [None] * group.size()
        dist.all_gather_object(everyone, bound, group=group)
        bounds.append(sum(everyone))
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
    arithmetic.check_total(bounds)
    arithmetic.to_float(store.batch, store.layout.homes)
