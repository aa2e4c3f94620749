"""Group statistics of rewards and the two numbers (a, c) that make a group's advantage affine: A_i = a r_i + c.

    normalisation    a               c
    std              1/(std+eps)     -mean/(std+eps)      population standard deviation
    sample_std       1/(std+eps)     -mean/(std+eps)      sample standard deviation (n - 1)
    none             1               -mean                Dr. GRPO
    leave_one_out    n/(n-1)         -n mean/(n-1)

Statistics are over the n survivors of a group, in float64 with exactly rounded sums, so they do not depend on the order
in which rewards arrive. A group whose rewards are all equal (one survivor included) has a = c = 0: it contributes
exactly 0. Called by grpo.py at the closure of a group.

Refuses: a normalisation that is not affine in the reward (by name, with the reason), a group of one where the
statistics need two, group sizes that do not add up, rewards that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megathunder.config.streamable import NORMALISATIONS, reject_non_streamable
from megathunder.errors import ConfigError, UserError


class Coefficients(NamedTuple):
    """A_i = a * r_i + c for every trajectory of one group."""

    a: float
    c: float

    def advantage(self, reward: float) -> float:
        return self.a * reward + self.c


ZERO = Coefficients(0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Count, mean and sum of squared deviations of the rewards of one group's survivors (float64)."""

    count: int
    mean: float
    squared_deviations: float
    degenerate: bool
    """All rewards equal (or at most one): the group contributes exactly 0."""

    @classmethod
    def of(cls, rewards: Sequence[float]) -> GroupStatistics:
        """Statistics of `rewards`, any order, any float type; UserError where one is not finite."""
        values = [float(r) for r in rewards]
        if not all(math.isfinite(v) for v in values):
            raise UserError(
                f"a group with rewards {values}",
                expected="finite rewards",
                remedy="report a failed verifier as an infrastructure failure, not as a NaN or infinite reward",
            )
        count = len(values)
        mean = math.fsum(values) / count if count else 0.0
        squares = math.fsum((v - mean) ** 2 for v in values)
        return cls(count=count, mean=mean, squared_deviations=squares, degenerate=len(set(values)) <= 1)

    def coefficients(self, normalisation: str, epsilon: float) -> Coefficients:
        """(a, c) of this group; both 0 where all rewards are equal."""
        if self.degenerate:
            return ZERO
        if normalisation == "none":
            a = 1.0
        elif normalisation == "leave_one_out":
            a = self.count / (self.count - 1)
        elif normalisation in ("std", "sample_std"):
            freedom = self.count if normalisation == "std" else self.count - 1
            a = 1.0 / (math.sqrt(self.squared_deviations / freedom) + epsilon)
        else:
            raise _unknown(normalisation)
        return Coefficients(a, -self.mean * a)


def check_normalisation(normalisation: str, group_size: int) -> None:
    """ConfigError where `normalisation` is unknown, not affine, or needs more than `group_size` trajectories."""
    if normalisation not in NORMALISATIONS:
        raise _unknown(normalisation)
    if group_size < 1 or (group_size == 1 and normalisation != "none"):
        raise ConfigError(
            f"grpo.advantage = {normalisation!r} with groups of {group_size}",
            expected="groups of at least 2: one reward has no spread and no other to compare with",
            remedy="set run.group_size to 2 or more (8 is usual), or use objective = 'opd', which has no groups",
        )


def _unknown(normalisation: str) -> ConfigError:
    reject_non_streamable(normalisation)
    return ConfigError(
        f"grpo.advantage = {normalisation!r}",
        expected=f"one of {', '.join(NORMALISATIONS)}",
        remedy="correct the name",
    )
