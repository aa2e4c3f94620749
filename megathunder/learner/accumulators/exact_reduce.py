"""The reduction of exact accumulators: integers are summed over ranks, then become floats once.

Integer sums are the same for every order and every assignment of contributions to ranks, so every rank's buffers hold
the same bits whatever the schedule was. Parameters that tensor or pipeline ranks share are then added in floating
point: the same few terms in the same order each time. Called by `learner.take_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads,
    _allreduce_word_embedding_grads,
)

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
    for flat, bound, group in zip(store.batch.flats, store.batch_bounds, groups, strict=True):
        everyone: list[int | None] = [None] * group.size()
        dist.all_gather_object(everyone, bound, group=group)
        bounds.append(sum(everyone))
        if group.size() > 1:
            dist.all_reduce(flat, group=group)
    arithmetic.check_total(bounds)
    arithmetic.to_float(store.batch, store.layout.homes)
    models, config = list(chunks), chunks[0].module.config
    tensor, pipeline = state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()
    embedding = state.get_embedding_group(check_initialized=False)
    _allreduce_non_tensor_model_parallel_grads(models, config, tensor)
    _allreduce_word_embedding_grads(models, config, embedding, pipeline)
