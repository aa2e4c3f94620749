"""What other schedules would have taken on the work of a recorded run.

Each recorded update (release times, tokens, rewards) is replayed through every schedule with costs fitted to the
recorded learner spans; the same suffix for all. Where it was measured, what rollout and learner cost each other at once
is part of it (`interference.py`). Called by tools/simulate.py and tools/compare.py, which read the run's files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.schedule.schedules import RULES
from megathunder.simulator.costs import CostModel
from megathunder.simulator.interference import Interference
from megathunder.simulator.schedule_replay import ReplayResult, replay
from megathunder.simulator.traces import UpdateTrace
from megathunder.simulator.variant import Variant

SCHEDULES = tuple(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedUpdate:
    """One update of a run: its trace and the step wall that was measured."""

    update: int
    schedule: str
    trace: UpdateTrace
    step_wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """One update under one schedule, simulated; `measured_s` where the run used this schedule."""

    update: int
    schedule: str
    step_wall_s: float
    rollout_s: float
    tail_s: float
    suffix_s: float
    learner_s: float
    wasted_share: float
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """All updates under all schedules. Speed-ups are ratios of median step walls to sync's, simulated."""

    costs: CostModel
    steps: tuple[PredictedStep, ...]
    speedup_vs_sync: dict[str, float]
    error_vs_measured: float | None
    """Median of |simulated - measured| / measured over updates whose schedule was run."""


def predict(
    config: Config,
    updates: Sequence[RecordedUpdate],
    costs: CostModel,
    *,
    cells: int = 1,
    schedules: Sequence[str] = SCHEDULES,
    interference: Interference = Interference(),
) -> Prediction:
    """Replay `updates`, recorded under sync where there is `interference`, under `schedules` (names as in
    variant.py)."""
    steps = []
    for recorded in updates:
        for schedule in schedules:
            trace = recorded.trace.stretched(interference.rollout.get(schedule, 1.0))
            beside = interference.learner.get(schedule, 1.0)
            result = replay(Variant.parse(schedule).apply(config), trace, costs, cells, beside=beside)
            steps.append(_step(recorded, schedule, result))
    medians = {s: statistics.median(x.step_wall_s for x in steps if x.schedule == s) for s in schedules}
    errors = [abs(s.step_wall_s - s.measured_s) / s.measured_s for s in steps if s.measured_s]
    return Prediction(
        costs=costs,
        steps=tuple(steps),
        speedup_vs_sync={s: medians["sync"] / m for s, m in medians.items()} if "sync" in medians else {},
        error_vs_measured=statistics.median(errors) if errors else None,
    )


def _step(recorded: RecordedUpdate, schedule: str, result: ReplayResult) -> PredictedStep:
    return PredictedStep(
        update=recorded.update,
        schedule=schedule,
        step_wall_s=result.step_wall_s,
        rollout_s=result.rollout_s,
        tail_s=result.tail_s,
        suffix_s=result.suffix_s,
        learner_s=result.learner_s,
        wasted_share=result.report.wasted_share,
        measured_s=recorded.step_wall_s if recorded.schedule == schedule else None,
    )
