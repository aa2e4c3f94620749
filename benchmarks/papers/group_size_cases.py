"""The streams on which group sizes are compared, and the published comparison as far as its summary lets it be drawn.

    heavy_tail    lognormal, the same throughout           growing_tail    its log-deviation grows by half over the run
    measured      lengths of recorded runs                 published       below

Published: DAPO with a 3B model, straggler rate .996 at a fixed 16, .434 with the controller; 29.5 h against 16.0 h.
Not published in what is at hand: tau, delta, the lengths, what a step costs. Assumed: lengths lognormal, cut off at
four times the median, with the log-deviation at which a fixed 16 straggles in .996 of its groups at tau = 1.5;
delta = .4; 32 prompts an update; a third of the wall of the fixed 16 each for latency, sampled and padded tokens.
Under these a group of 4 already straggles in more than .434 of cases, so a stream that does not change cannot give the
published rate. `narrowing` is the one number fitted to it: the log-deviation under the controller ends at that share of
where it began, which stands for the shorter outputs that the paper reports of it. The wall is then predicted, not
fitted; beside it stands the share of latency (tokens and padding alike in the rest) that would give the published one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.papers.group_sizes import Case, Load, Lognormal, Measured, Played, WallModel, play, risk
from megathunder.config.sagc import SagcConfig
from megathunder.errors import UserError

FIXED = (4, 8, 16)
THIRD = 1.0 / 3.0
LEAST_CHOICE = 0.1
PUBLISHED_RATES, PUBLISHED_H = (0.996, 0.434), (29.5, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One policy on one stream: means over seeds. `wall` is relative to the fixed 16."""

    policy: str
    straggler_rate: float
    rate_deviation: float
    """Standard deviation over seeds."""
    utility: float
    wall: float
    trajectories: int
    groups_by_size: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All policies on one stream, the risk of each size on it, and the controller's course in the first seed."""

    name: str
    target_rate: float
    threshold: float
    trajectories_per_update: int
    risks: dict[int, float]
    lines: tuple[Line, ...]
    course: Played


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedCase:
    """What the assumptions give beside what was published; hours are scaled so that the fixed 16 takes 29.5."""

    spread: float
    smallest_risk: float
    """Risk of a group of 4 where nothing narrows: no control can be below it."""
    stationary_rate: float
    stationary_h: float
    narrowing: float
    rates: dict[str, float]
    hours: dict[str, float]
    latency_share_of_published: float | None
    """None: no share gives the published wall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SagcResult:
    """What the tool writes."""

    assumptions: str
    seeds: int
    comparisons: tuple[Comparison, ...]
    published: PublishedCase


def synthetic(updates: int = 400) -> list[Case]:
    """The drawn streams, with a fixed number of prompts and with a fixed number of trajectories."""
    settings = SagcConfig(target_rate=0.4, threshold=2.0)
    heavy, growing = Lognormal(spread=0.6), Lognormal(spread=0.45, narrowing=1.5)
    return [
        Case(name="heavy_tail", lengths=heavy, settings=settings, updates=updates),
        Case(name="heavy_tail, 64 trajectories", lengths=heavy, settings=settings, updates=updates, trajectories=64),
        Case(name="growing_tail", lengths=growing, settings=settings, updates=updates),
    ]


def measured(name: str, groups: Sequence[Sequence[float]], threshold: float = 1.5, updates: int = 400) -> Case:
    """The stream of a recorded run; the target lies between the risks of 4 and 16."""
    lengths = Measured(groups=tuple(tuple(group) for group in groups))
    low, high = (risk(lengths, size, threshold) for size in (FIXED[0], FIXED[-1]))
    settings = SagcConfig(target_rate=round((low + high) / 2, 2), threshold=threshold)
    return Case(name=name, lengths=lengths, settings=settings, updates=updates, trajectories=64)


def has_choice(case: Case) -> bool:
    """Whether sizes differ in risk enough for there to be something to control."""
    low, high = (risk(case.lengths, size, case.settings.threshold) for size in (FIXED[0], FIXED[-1]))
    return high - low > LEAST_CHOICE


def compare(case: Case, seeds: int) -> Comparison:
    """Every policy on `case`; UserError without a seed."""
    refuse_no_seed(seeds)
    played = {size: [play(case, size, seed) for seed in range(seeds)] for size in (*FIXED, None)}
    wall = WallModel.shares(sum_of(played[FIXED[-1]]), 1.0, THIRD, THIRD)
    return Comparison(
        name=case.name,
        target_rate=case.settings.target_rate,
        threshold=case.settings.threshold,
        trajectories_per_update=case.trajectories,
        risks={size: risk(case.lengths, size, case.settings.threshold) for size in FIXED},
        lines=tuple(_line(runs, wall) for runs in played.values()),
        course=played[None][0],
    )


def refuse_no_seed(seeds: int) -> None:
    if seeds < 1:
        raise UserError(
            f"{seeds} seeds", expected="at least one run of every policy", remedy="give --seeds 1 or more; 5 is usual"
        )


def sum_of(runs: Sequence[Played]) -> Load:
    return sum((run.load for run in runs), Load())


def _line(runs: Sequence[Played], wall: WallModel) -> Line:
    sizes = sorted({size for run in runs for size in run.groups_by_size})
    return Line(
        policy=runs[0].policy,
        straggler_rate=statistics.fmean(run.straggler_rate for run in runs),
        rate_deviation=statistics.pstdev(run.straggler_rate for run in runs),
        utility=statistics.fmean(run.utility for run in runs),
        wall=wall.wall_s(sum_of(runs)),
        trajectories=sum(run.trajectories for run in runs) // len(runs),
        groups_by_size={size: sum(run.groups_by_size.get(size, 0) for run in runs) for size in sizes},
    )


def published(seeds: int = 2, updates: int = 200) -> PublishedCase:
    """See the module docstring."""
    settings = SagcConfig(target_rate=0.4, threshold=1.5)
    lengths = Lognormal(spread=1.0, longest=4000.0)
    spread = _bisect(
        lambda s: risk(replace(lengths, spread=s), 16, settings.threshold) - PUBLISHED_RATES[0], 0.3, 0.8, steps=10
    )
    lengths = replace(lengths, spread=spread)
    still = Case(name="published", lengths=lengths, settings=settings, updates=updates, prompts=32, first=16)

    def narrowed(share: float) -> list[Played]:
        case = replace(still, lengths=replace(lengths, narrowing=share))
        return [play(case, None, seed) for seed in range(seeds)]

    def rate(runs: Sequence[Played]) -> float:
        return statistics.fmean(run.straggler_rate for run in runs)

    fixed = {size: [play(still, size, seed) for seed in range(seeds)] for size in FIXED}
    narrowing = _bisect(lambda share: rate(narrowed(share)) - PUBLISHED_RATES[1], 0.05, 1.0, steps=10)
    stationary, controlled = narrowed(1.0), narrowed(narrowing)
    wall = WallModel.shares(sum_of(fixed[16]), PUBLISHED_H[0], THIRD, THIRD)
    named = {**{f"fixed {size}": runs for size, runs in fixed.items()}, "sagc": controlled}
    return PublishedCase(
        spread=spread,
        smallest_risk=risk(lengths, FIXED[0], settings.threshold),
        stationary_rate=rate(stationary),
        stationary_h=wall.wall_s(sum_of(stationary)),
        narrowing=narrowing,
        rates={name: rate(runs) for name, runs in named.items()},
        hours={name: wall.wall_s(sum_of(runs)) for name, runs in named.items()},
        latency_share_of_published=_share_for(sum_of(fixed[16]), sum_of(controlled), PUBLISHED_H),
    )


def _share_for(base: Load, load: Load, hours: tuple[float, float]) -> float | None:
    """Share x of latency, the rest halved, under which `load` takes hours[1] if `base` takes hours[0]; linear in x."""
    at_0, at_1 = (WallModel.shares(base, hours[0], x, (1.0 - x) / 2).wall_s(load) for x in (0.0, 1.0))
    share = (hours[1] - at_0) / (at_1 - at_0)
    return share if 0.0 <= share <= 1.0 else None


def _bisect(increasing: Callable[[float], float], low: float, high: float, steps: int = 20) -> float:
    for _ in range(steps):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if increasing(middle) > 0 else (middle, high)
    return math.sqrt(low * high)
