"""Accumulators of open groups, shared out over the ranks of a cell that hold the same parameters.

    backward          a whole gradient G_r on every rank r of R, in a scratch
    reduce-scatter    rank r is left with part r of sum_r G_r; it is added to part r of the accumulator
    fold              batch[part r] += coefficient * part r: no rank needs another one
    barrier           the reduction of the batch over data-parallel ranks puts the parts together

Each rank holds 1/R of every accumulator, for one scratch (4 bytes a parameter) and a reduce-scatter a micro-batch: it
pays from two accumulators on, and the more the more groups are open. The R ranks are those of Megatron's data-parallel
(and context-parallel) group that `learner.accumulator_shards` joins into one cell; experts have their own group. A
group's accumulators never leave its cell, so cells still do not wait for each other before the barrier; what is given
up is that those R replicas pull work one by one: they take one item together and split its rows.
Under exact sums integers are scattered, so the sum has the bits it has without sharding. Called by the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megathunder.learner.accumulators.layout import Flats, GradientLayout

PIECE = 1 << 20  # elements of each part in one reduce-scatter


class Shards:
    """This rank's part of every gradient buffer; `groups` has the ranks that share each of them, None where nobody
    does."""

    def __init__(self, layout: GradientLayout, groups: Sequence[dist.ProcessGroup | None]) -> None:
        self._groups = [None if group is None or group.size() == 1 else group for group in groups]
        self._sizes: list[int] = []  # elements of the first part; the last may be shorter
        self._spans: list[slice] = []
        for home, group in zip(layout.homes, self._groups, strict=True):
            ways, mine = (1, 0) if group is None else (group.size(), group.rank())
            size = -(-home.numel() // ways)
            self._sizes.append(size)
            self._spans.append(slice(min(mine * size, home.numel()), min((mine + 1) * size, home.numel())))

    def parts(self, flats: Flats) -> Flats:
        """This rank's part of each, as views."""
        return [flat[span] for flat, span in zip(flats, self._spans, strict=True)]

    def counts(self, bucket: int) -> bool:
        """Whether this rank speaks for all that share `bucket`, where something must be counted once."""
        group = self._groups[bucket]
        return group is None or group.rank() == 0

    def reduce(self, gradient: Flats) -> Flats:
        """This rank's part of the sum over ranks; overwrites it in `gradient`."""
        mine = self.parts(gradient)
        for bucket, (flat, part) in enumerate(zip(gradient, mine, strict=True)):
            if self._groups[bucket] is not None:
                for at, stacked in self.stacked(bucket, flat):
                    total = self.sum(bucket, stacked)[: part[at : at + PIECE].numel()]
                    part[at : at + PIECE].copy_(total)
        return mine

    def stacked(self, bucket: int, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(first element within a part, [R, n] of all parts), piece by piece; zeros stand for what a shorter part
        lacks. The same number of pieces on every rank."""
        size = self._sizes[bucket]
        ways = 1 if self._groups[bucket] is None else self._groups[bucket].size()
        for at in range(0, size, PIECE):
            count = min(PIECE, size - at)
            out = flat.new_zeros(ways, count)
            for rank in range(ways):
                found = flat[rank * size + at : min(rank * size + at + count, (rank + 1) * size)]
                out[rank, : found.numel()] = found
            yield at, out

    def sum(self, bucket: int, stacked: Tensor) -> Tensor:
        """[R, n] on every rank -> [n], row r summed over ranks, on rank r."""
        group = self._groups[bucket]
        if group is None:
            return stacked[0]
        out = torch.empty_like(stacked[0])
        dist.reduce_scatter_single(out, stacked.view(-1), group=group)
        return out

    def agree(self, bucket: int, units: int, value: float) -> tuple[int, float]:
        """(sum of `units`, the `value` of the rank with most units): the same on every rank."""
        group = self._groups[bucket]
        if group is None:
            return units, value
        bits = torch.tensor([value], dtype=torch.float64).view(torch.int64)
        mine = torch.cat([torch.tensor([units]), bits]).to(torch.device("cuda") if _on_gpu(group) else "cpu")
        everyone = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(everyone, mine, group=group)
        found = [one.cpu() for one in everyone]
        most = max(found, key=lambda one: int(one[0]))
        return sum(int(one[0]) for one in found), float(most[1:].view(torch.float64)[0])


def _on_gpu(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"
