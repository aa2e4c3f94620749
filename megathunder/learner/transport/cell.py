"""What the ranks of a cell tell their leader about the work they did together.

The loss and the log-probabilities are known on the last pipeline stage, the rows are split over expert replicas, and
tensor ranks know the same. So sums run over replicas of tensor rank 0. Called by `learner.py` after every command.
"""

from __future__ import annotations

from functools import reduce
from operator import add, or_

import msgspec
import torch
import torch.distributed as dist

from megathunder.learner.parallel import Layout
from megathunder.work_stats import WorkStats

Place = tuple[int, int, int]
LENGTH_BYTES, MESSAGE_BYTES = 8, 2048
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Place, WorkStats])


def summed_over_cell(stats: WorkStats, layout: Layout) -> WorkStats:
    """The cell's stats on every rank of it; a cell of one rank answers at once."""
    if len(layout.cell_ranks) == 1 or (layout.pipeline == 1 and layout.cell_replicas == 1):
        return stats
    stages: dict[int, list[WorkStats]] = {}
    for (tensor, context, stage), found in _gathered(stats, layout):
        if tensor == 0 and context == 0:
            stages.setdefault(stage, []).append(found)
    heads = [found for stage in stages.values() for found in stage]
    first, last = stages[0], stages[layout.pipeline - 1]
    whole = msgspec.structs.replace(
        stats,
        tokens=sum(s.tokens for s in first),
        trained_tokens=sum(s.trained_tokens for s in first),
        replay_tokens=sum(s.replay_tokens for s in first),
        flops=sum(s.flops for s in first),
        divergences=last[0].divergences,  # every replica scores all rows
        loss_sum=sum(s.loss_sum for s in last),
        logprob_diff_sum=sum(s.logprob_diff_sum for s in last),
        logprob_diff_max=max(s.logprob_diff_max for s in last),
        logprob_gaps=tuple(gap for s in last for gap in s.logprob_gaps),
        accumulator_bytes=max(s.accumulator_bytes for s in heads),
        prompt_tokens_saved=None,
        kl_sum=None,
        exposed_copy_s=None,
        salt=None,
    )
    return reduce(or_, (reduce(add, stage) for stage in stages.values()), whole)


def _gathered(stats: WorkStats, layout: Layout) -> list[tuple[Place, WorkStats]]:
    """(tensor rank, context rank, stage) and stats of every rank of the cell. One collective of fixed length says how
    long the messages are and carries them, where they are short enough."""
    place = (layout.tensor_rank, layout.context_rank, layout.pipeline_rank)
    data = _encoder.encode((place, stats))
    first = _gather(len(data).to_bytes(LENGTH_BYTES, "little") + data, LENGTH_BYTES + MESSAGE_BYTES, layout)
    lengths = [int.from_bytes(message[:LENGTH_BYTES], "little") for message in first]
    messages = [message[LENGTH_BYTES:] for message in first]
    if max(lengths) > MESSAGE_BYTES:
        messages = _gather(data, max(lengths), layout)
    return [_decoder.decode(message[:length]) for message, length in zip(messages, lengths, strict=True)]


def _gather(data: bytes, length: int, layout: Layout) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data[:length].ljust(length, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in layout.cell_ranks]
    dist.all_gather(everyone, mine, group=layout.cell_group)
    return [part.numpy().tobytes() for part in everyone]
