"""The release model: how long after the last rollout does a work-conserving learner finish?

Rollout takes time 1, learner work takes rho, F(t) is the fraction of that work released by t. Then
    finish = max over t of [t + rho (1 - F(t-))]          tail = finish - 1
    D = max over t of (t - F(t-))                          [rho - 1]+ <= tail <= [rho - 1]+ + rho D
    speed-up over sync = (1 + rho + s) / (1 + tail + s)    s: the publication suffix; at most 2 (rho = 1, tail = s = 0)
Uniform release gives exactly [rho - 1]+; n midpoint quantiles give D at most 1/(2n) more and a tail error of at most
rho/(2n). Times are shares of the rollout time. Called by sweep.py and plan.py.
Refuses releases outside [0, 1] and negative work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from megathunder.errors import UserError

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Release:
    """`work` (any unit) becomes runnable at `at`, a share of the rollout time."""

    at: float
    work: float


class ReleaseCurve:
    """F(t): releases in order of time, as shares of all work."""

    def __init__(self, releases: Iterable[Release]) -> None:
        ordered = sorted(releases, key=lambda r: r.at)
        total = math.fsum(r.work for r in ordered)
        if (
            not ordered
            or total <= 0
            or ordered[0].at < 0
            or ordered[-1].at > 1 + 1e-9
            or min(r.work for r in ordered) < 0
        ):
            raise UserError(
                f"{len(ordered)} releases with total work {total}",
                expected="at least one, each at a share of the rollout time in [0, 1], with work that is not negative",
                remedy="divide release times by the time of the last one",
            )
        self.steps: list[tuple[float, float]] = []  # (time, share of the work released strictly before)
        before = 0.0
        for release in ordered:
            self.steps.append((release.at, before / total))
            before += release.work

    @property
    def discrepancy(self) -> float:
        """D = max over t in [0, 1] of (t - F(t-)); 0 at least, at t = 0."""
        return max(0.0, max(at - before for at, before in self.steps))

    def tail(self, rho: float) -> float:
        """Learner time after the rollout ends, for learner work `rho`."""
        return max(1.0, max(at + rho * (1.0 - before) for at, before in self.steps)) - 1.0


def speedup(rho: float, tail: float, suffix: float) -> float:
    """Step wall of sync over that of a schedule with this tail; all shares of the rollout time."""
    return (1.0 + rho + suffix) / (1.0 + tail + suffix)


def tail_bounds(rho: float, discrepancy: float) -> tuple[float, float]:
    """Least and greatest tail at this discrepancy."""
    least = max(rho - 1.0, 0.0)
    return least, least + rho * discrepancy


def lognormal_midpoints(count: int, spread: float) -> list[float]:
    """`count` lognormal durations at midpoint quantiles, log-deviation `spread`, as shares of the longest."""
    z = [_NORMAL.inv_cdf((i + 0.5) / count) for i in range(count)]
    longest = spread * z[-1]
    return [math.exp(spread * x - longest) for x in z]


def trajectory_releases(durations: Sequence[float]) -> list[Release]:
    """One release a trajectory, at its completion; equal work."""
    return [Release(d, 1.0) for d in durations]


def turn_releases(durations: Sequence[float], turns: int) -> list[Release]:
    """A trajectory's work is released in `turns` equal parts, evenly over its duration."""
    return [Release(d * (t + 1) / turns, 1.0) for d in durations for t in range(turns)]
