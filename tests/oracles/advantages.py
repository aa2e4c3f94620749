"""Advantages of a whole batch at once, from the textbook formulas: what streamed weights must equal.

Shares no code with the package. Names are those of `grpo.advantage`; a deviation over the batch is left out, since it
is one number for all: `batch_deviation` is that number.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from megathunder.errors import UserError

MEAN_FREE = ("none", "reinforce_plus_plus_baseline")


def group_advantages(rewards: Sequence[float], name: str, epsilon: float = 1e-6, k: int = 2) -> list[float]:
    """Advantages of one group's survivors under one reward."""
    n, values = len(rewards), [float(r) for r in rewards]
    if len(set(values)) <= 1:
        return [0.0] * n
    mean = math.fsum(values) / n
    if name in MEAN_FREE:
        return [r - mean for r in values]
    if name == "leave_one_out":
        return [r - (math.fsum(values) - r) / (n - 1) for r in values]
    if name == "maxrl":
        return [(r - mean) / (mean + epsilon) for r in values]
    if name == "pass_at_k":
        return [_subset_advantage(values, i, k) for i in range(n)]
    spread = statistics.stdev(values) if name == "sample_std" else statistics.pstdev(values)
    return [(r - mean) / (spread + epsilon) for r in values]


def _subset_advantage(values: Sequence[float], own: int, k: int) -> float:
    """Over every subset of k: those with `own` against those without."""
    if len(values) <= k:
        return 0.0
    subsets = list(itertools.combinations(range(len(values)), k))
    with_it = [max(values[i] for i in s) for s in subsets if own in s]
    without = [max(values[i] for i in s) for s in subsets if own not in s]
    return k * (sum(with_it) / len(with_it) - sum(without) / len(without))


def advantages(
    rewards: Sequence[float | None], group_sizes: Sequence[int], name: str, epsilon: float = 1e-6, k: int = 2
) -> list[float]:
    """Advantage of every trajectory of a batch whose groups lie one after another; None marks an infrastructure
    failure, which counts in no statistic and gets 0.

    >>> [round(x, 4) for x in advantages([1, 0, 1, 0, 1], [3, 2], "none")]
    [0.3333, -0.6667, 0.3333, -0.5, 0.5]
    """
    return by_group(rewards, group_sizes, lambda group: group_advantages(group, name, epsilon, k))


def by_group(
    rewards: Sequence[float | None], group_sizes: Sequence[int], rule: Callable[[list[float]], Sequence[float]]
) -> list[float]:
    """`rule` over the survivors of each group."""
    if sum(group_sizes) != len(rewards):
        raise UserError(
            f"group sizes {list(group_sizes)} that add up to {sum(group_sizes)} for {len(rewards)} rewards",
            expected="one reward (or None) for every trajectory",
            remedy="pass the sizes of the groups as they were sampled, lost trajectories included",
        )
    result: list[float] = []
    start = 0
    for size in group_sizes:
        group = rewards[start : start + size]
        found = iter(rule([float(r) for r in group if r is not None]))
        result += [0.0 if r is None else next(found) for r in group]
        start += size
    return result


def separate_advantages(
    rewards: Sequence[Sequence[float]], weights: Sequence[float] = (), epsilon: float = 1e-6
) -> list[float]:
    """GDPO before the batch: every reward of a group normalised by itself, then added; [n][K] -> [n]."""
    columns = [group_advantages(column, "std", epsilon) for column in zip(*rewards, strict=True)]
    factors = weights or [1.0] * len(columns)
    return [math.fsum(w * a for w, a in zip(factors, row, strict=True)) for row in zip(*columns, strict=True)]


def batch_deviation(weights: Sequence[float]) -> float:
    """Standard deviation over the batch; weights have mean 0 in every group."""
    return statistics.pstdev(weights) if weights else 0.0
