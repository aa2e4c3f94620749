"""The release model against replay, over 588 paired configurations.

    objective (2) x duration spread (7) x balance rho (7) x batch size (3) x turns (2)

For each: the speed-up over sync that the closed form gives from the midpoint quantiles of the duration distribution,
and the one that replay of a drawn trace through the schedule gives, sync and thundersync on the same trace. Work per
turn is equal; a GRPO trajectory is released at its reward, an OPD turn at its score; replayed context is left out, as
in the release model; the suffix is a constant share of the rollout. Called by tools/simulate.py.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.simulator.costs import CostModel
from megathunder.simulator.release_model import (
    ReleaseCurve,
    lognormal_midpoints,
    speedup,
    trajectory_releases,
    turn_releases,
)
from megathunder.simulator.schedule_replay import replay
from megathunder.simulator.traces import UpdateTrace, Workload, draw_trace

OBJECTIVES = ("grpo", "opd")
SPREADS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
BALANCES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
BATCHES = (64, 128, 256)
TURNS = (4, 16)
GROUP_SIZE = 8
SUFFIX = 0.03
"""Share of the rollout time; the paper's own 20 s of 690 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One configuration."""

    objective: str
    spread: float
    balance: float
    batch: int
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Predicted speed-ups of thundersync over sync at one configuration; tails are shares of the rollout time."""

    objective: str
    spread: float
    balance: float
    batch: int
    turns: int
    analytic_speedup: float
    trace_speedup: float
    analytic_tail: float
    trace_tail: float
    blocked_share: float
    """Cell time blocked by the cap on open groups, as a share of the rollout."""
    rel_diff: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """All rows and the two numbers that sum them up."""

    configurations: int
    mean_rel_diff: float
    max_rel_diff: float
    mean_rel_diff_by_objective: dict[str, float]
    rows: tuple[SweepRow, ...]


def points() -> Iterator[Point]:
    """The 588 configurations."""
    for objective, spread, balance, batch, turns in itertools.product(OBJECTIVES, SPREADS, BALANCES, BATCHES, TURNS):
        yield Point(objective=objective, spread=spread, balance=balance, batch=batch, turns=turns)


def sweep(chosen: Sequence[Point], seed: int = 0) -> SweepResult:
    """Both predictions at every point. Points that differ in balance alone share a trace."""
    traces: dict[tuple[float, int, int], UpdateTrace] = {}
    rows = []
    for point in chosen:
        key = (point.spread, point.batch, point.turns)
        if key not in traces:
            workload = Workload(
                groups=point.batch // GROUP_SIZE, group_size=GROUP_SIZE, turns=point.turns, spread=point.spread
            )
            traces[key] = draw_trace(workload, hash(key) ^ seed)
        rows.append(compare(point, traces[key]))
    differences = [row.rel_diff for row in rows]
    by_objective = {name: [row.rel_diff for row in rows if row.objective == name] for name in OBJECTIVES}
    return SweepResult(
        configurations=len(rows),
        mean_rel_diff=statistics.fmean(differences),
        max_rel_diff=max(differences),
        mean_rel_diff_by_objective={name: statistics.fmean(d) for name, d in by_objective.items() if d},
        rows=tuple(rows),
    )


def analytic_tail(point: Point) -> float:
    """Tail by the closed form, from midpoint quantiles."""
    durations = lognormal_midpoints(point.batch, point.spread)
    by_turn = point.objective == "opd"
    releases = turn_releases(durations, point.turns) if by_turn else trajectory_releases(durations)
    return ReleaseCurve(releases).tail(point.balance)


def compare(point: Point, trace: UpdateTrace) -> SweepRow:
    """Closed form and replay at one configuration."""
    rollout_s = trace.rollout_s
    timed = replace(trace, suffix_s=SUFFIX * rollout_s)
    costs = CostModel(token_s=point.balance * rollout_s / trace.tokens, replay=0.0)
    config = Config(
        objective="opd" if point.objective == "opd" else "grpo",
        schedule="thundersync",
        learner=LearnerConfig(),
        streaming=StreamingConfig(
            release="turn" if point.objective == "opd" else "trajectory",
            pack_tokens=point.turns,  # one trajectory's tokens: fine grain, as the closed form assumes
            max_open_groups=point.batch,
        ),
    )
    streamed = replay(config, timed, costs)
    barrier = replay(replace(config, schedule="sync"), timed, costs)
    tail = analytic_tail(point)
    analytic = speedup(point.balance, tail, SUFFIX)
    measured = barrier.step_wall_s / streamed.step_wall_s
    return SweepRow(
        objective=point.objective,
        spread=point.spread,
        balance=point.balance,
        batch=point.batch,
        turns=point.turns,
        analytic_speedup=analytic,
        trace_speedup=measured,
        analytic_tail=tail,
        trace_tail=streamed.tail_s / rollout_s,
        blocked_share=streamed.report.blocked_s / rollout_s,
        rel_diff=abs(analytic - measured) / measured,
    )
