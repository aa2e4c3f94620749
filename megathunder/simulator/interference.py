"""What rollout and learner cost each other where they run at once on one machine (caches, memory, a busy host).

    rollout[schedule]   rollout time of the schedule by that of sync, on the same work
    learner[schedule]   seconds of learner work done while rollouts ran by what the same work costs alone

Measured on the warm-up updates of a comparison, and used to predict its measured ones: no update is predicted from its
own times. 1 where nothing was measured. Called by recorded.py and predict.py.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megathunder.metrics.row import MetricsRow
from megathunder.metrics.spans import Span
from megathunder.simulator.costs import CostModel
from megathunder.simulator.variant import Variant
from megathunder.tracing import LEARNER_LANES, UPDATE_LANE

BASE = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """See the module docstring."""

    rollout: Mapping[str, float] = field(default_factory=dict)
    learner: Mapping[str, float] = field(default_factory=dict)


def measure_interference(rows: Sequence[MetricsRow], spans: Sequence[Span], alone: CostModel) -> Interference:
    """From `rows` in the order of their batches: the k-th of every schedule is of the same work."""
    by_schedule: dict[str, list[MetricsRow]] = defaultdict(list)
    for row in rows:
        by_schedule[row.schedule].append(row)
    base = by_schedule.pop(BASE, [])
    ends = {s.update: s.end_s for s in spans if s.lane == UPDATE_LANE and s.name == "rollout"}
    rollout, learner = {}, {}
    for name, own in by_schedule.items():
        ratios = [a.rollout_s / b.rollout_s for a, b in zip(own, base) if b.rollout_s > 0]
        if ratios:
            rollout[name] = statistics.median(ratios)
        if Variant.parse(name).release not in (None, "trajectory"):
            continue  # other kinds of passes, at other costs
        updates = {row.update for row in own}
        beside = [s for s in _work(spans) if s.update in updates and s.start_s < ends.get(s.update, 0.0)]
        expected = sum(alone.item_s + alone.price(0, s.tokens) for s in beside)
        if expected > 0:
            learner[name] = sum(s.end_s - s.start_s for s in beside) / expected
    return Interference(rollout=rollout, learner=learner)


def _work(spans: Sequence[Span]) -> list[Span]:
    return [s for s in spans if s.lane.startswith(LEARNER_LANES) and s.name == "differentiate"]
