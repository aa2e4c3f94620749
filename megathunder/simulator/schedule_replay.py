"""Discrete-event replay of a trace through the same schedule objects that run live, on a virtual clock.

    next instant = the earliest of (next rollout event, next end of an item); deliver all of it; give free cells work

one_step_off is replayed in its steady state: the learner works on a batch that has already ended while the next is
sampled, so a step takes max(rollout, learner) + suffix. Called by sweep.py and tools/simulate.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.schedule.scheduler import ScheduleReport, UpdateScheduler
from megathunder.schedule.schedules import RULES
from megathunder.simulator.costs import CostModel
from megathunder.simulator.traces import UpdateTrace, rollout_events
from megathunder.types import Differentiate, Done, Event, Fold, Score, WorkStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSpan:
    """A cell worked from `start_s` to `end_s`."""

    cell: int
    start_s: float
    end_s: float
    kind: str
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """One simulated update. `rollout_s` is the last reward or score, `tail_s` the learner time after it."""

    schedule: str
    rollout_s: float
    tail_s: float
    suffix_s: float
    learner_s: float
    """Busy seconds, summed over cells."""
    spans: tuple[WorkSpan, ...]
    report: ScheduleReport

    @property
    def step_wall_s(self) -> float:
        return self.rollout_s + self.tail_s + self.suffix_s


def replay(
    config: Config, trace: UpdateTrace, costs: CostModel, cells: int = 1, *, beside: float = 1.0
) -> ReplayResult:
    """Simulate one update of `trace` under `config.schedule`; work that starts while rollouts run costs `beside` times
    as much."""
    events = rollout_events(trace)
    ahead = RULES[config.schedule].samples_ahead
    times = [0.0 if ahead else event.at_s for event in events]
    machine = _Machine(config, trace, costs, cells, beside)
    finish = machine.run(events, times)
    rollout_s = trace.rollout_s
    return ReplayResult(
        schedule=config.schedule,
        rollout_s=rollout_s,
        tail_s=max(finish - rollout_s, 0.0),
        suffix_s=trace.suffix_s,
        learner_s=sum(s.end_s - s.start_s for s in machine.spans),
        spans=tuple(machine.spans),
        report=machine.scheduler.report,
    )


class _Machine:
    """Cells on a virtual clock."""

    def __init__(self, config: Config, trace: UpdateTrace, costs: CostModel, cells: int, beside: float) -> None:
        self.scheduler = UpdateScheduler(config, 0, 0, trace.group_sizes, cells)
        self.spans: list[WorkSpan] = []
        self._costs, self._release = costs, config.streaming.release
        self._beside, self._rollout_s = beside, trace.rollout_s
        self._free = set(range(cells))
        self._running: list[tuple[float, int, Differentiate | Fold | Score]] = []

    def run(self, events: list[Event], times: list[float]) -> float:
        """Deliver `events` at `times`; the instant of the last end of work."""
        position, now = 0, 0.0
        while position < len(events) or self._running:
            now = min([*times[position : position + 1], *(r[0] for r in self._running[:1])])
            while position < len(events) and times[position] <= now:
                self.scheduler.on_event(events[position], now)
                position += 1
            while self._running and self._running[0][0] <= now:
                end, cell, command = heapq.heappop(self._running)
                self._free.add(cell)
                near = (0.0,) * len(command.rows) if isinstance(command, Score) else ()  # no divergence is recorded
                stats = WorkStats(tokens=_tokens(command), divergences=near)
                done = Done(item=command.item, cell=cell, started_s=end, ended_s=end, stats=stats)
                self.scheduler.on_done(done, now)
            for cell in sorted(self._free):
                self._start(cell, now)
        assert self.scheduler.finished, "every event is delivered and every item done"
        return max((s.end_s for s in self.spans), default=0.0)

    def _start(self, cell: int, now: float) -> None:
        command = self.scheduler.next_work(cell, now)
        if command is None:
            return
        factor = self._beside if now < self._rollout_s else 1.0
        end = now + factor * self._costs.seconds(command, self._release)
        self._free.discard(cell)
        heapq.heappush(self._running, (end, cell, command))
        kind = command.target.kind.value if isinstance(command, Differentiate) else type(command).__name__.lower()
        rows = 0 if isinstance(command, Fold) else len(command.rows)
        self.spans.append(WorkSpan(cell=cell, start_s=now, end_s=end, kind=kind, rows=rows))


def _tokens(command: Differentiate | Fold | Score) -> int:
    """New tokens of the command's rows."""
    if not isinstance(command, Differentiate):
        return 0
    return sum(len(row.token_ids) - row.context_tokens for row in command.rows)
