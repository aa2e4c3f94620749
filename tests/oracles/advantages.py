"""Advantages of a whole batch at once: what streamed coefficients must equal, trajectory by trajectory."""

from __future__ import annotations

from collections.abc import Sequence

from megathunder.errors import UserError
from megathunder.objectives.advantage import GroupStatistics


def advantages(
    rewards: Sequence[float | None], group_sizes: Sequence[int], normalisation: str, epsilon: float = 1e-6
) -> list[float]:
    """Advantage of every trajectory of a batch whose groups lie one after another; None marks an infrastructure
    failure, which counts in no statistic and gets 0.

    >>> [round(x, 4) for x in advantages([1, 0, 1, 0, 1], [3, 2], "none")]
    [0.3333, -0.6667, 0.3333, -0.5, 0.5]
    """
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
        statistics = GroupStatistics.of([r for r in group if r is not None])
        coefficients = statistics.coefficients(normalisation, epsilon)
        result += [0.0 if r is None else coefficients.advantage(float(r)) for r in group]
        start += size
    return result
