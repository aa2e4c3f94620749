"""What the ranks of a cell tell their leader about the work they did together.

The loss and the log-probabilities are known on the last pipeline stage, the rows are split over expert replicas, and
tensor ranks know the same. So sums run over replicas of tensor rank 0. Called by `learner.py` after every command.
"""

from __future__ import annotations

from collections import Counter

import torch.distributed as dist

from megathunder.learner.parallel import Layout
from megathunder.types import WorkStats


def summed_over_cell(stats: WorkStats, layout: Layout) -> WorkStats:
    """The cell's stats on every rank of it; a cell of one rank answers at once."""
    if len(layout.cell_ranks) == 1 or (layout.pipeline == 1 and layout.cell_replicas == 1):
        return stats
    everyone: list[tuple[int, int, int, WorkStats] | None] = [None] * len(layout.cell_ranks)
    mine = (layout.tensor_rank, layout.context_rank, layout.pipeline_rank, stats)
    dist.all_gather_object(everyone, mine, group=layout.cell_group)
    heads = [(stage, s) for tensor, context, stage, s in everyone if tensor == 0 and context == 0]
    first = [s for stage, s in heads if stage == 0]
    last = [s for stage, s in heads if stage == layout.pipeline - 1]
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return WorkStats(
        **fields
        | {
            "tokens": sum(s.tokens for s in first),
            "trained_tokens": sum(s.trained_tokens for s in first),
            "replay_tokens": sum(s.replay_tokens for s in first),
            "flops": sum(s.flops for s in first),
            "divergences": last[0].divergences,  # every replica scores all rows
            "loss_sum": sum(s.loss_sum for s in last),
            "logprob_diff_sum": sum(s.logprob_diff_sum for s in last),
            "logprob_diff_max": max(s.logprob_diff_max for s in last),
            "extra": _extra(heads),
            "accumulator_bytes": max(s.accumulator_bytes for _, s in heads),
        }
    )


def _extra(heads: list[tuple[int, WorkStats]]) -> dict[str, float]:
    """Sums over replicas; what every stage of a pipeline counts is taken from the one that counts most."""
    by_stage: dict[int, Counter[str]] = {}
    for stage, stats in heads:
        by_stage.setdefault(stage, Counter()).update(stats.extra)
    names = {name for found in by_stage.values() for name in found}
    return {name: max((found[name] for found in by_stage.values() if name in found), key=abs) for name in sorted(names)}
