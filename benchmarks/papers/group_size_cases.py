"""The streams on which group sizes are compared.

    heavy_tail      lognormal, the same throughout
    growing_tail    lognormal, its log-deviation grows by half over the run
    measured        lengths of recorded runs

Assumed: a third of the wall of a fixed 16 each for latency, sampled and padded tokens. Called by
tools/simulate.py sagc. Refuses (UserError) a comparison of no run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.papers.group_sizes import Case, Load, Lognormal, Measured, Played, WallModel, play, risk
from megathunder.config.sagc import SagcConfig
from megathunder.errors import UserError

FIXED = (4, 8, 16)
THIRD = 1.0 / 3.0
LEAST_CHOICE = 0.1


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
class SagcResult:
    """What the tool writes."""

    assumptions: str
    seeds: int
    comparisons: tuple[Comparison, ...]


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
