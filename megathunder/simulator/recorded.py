"""A run's files as traces and costs: what prediction starts from.

    traces   trajectories/update_*.jsonl and the start of each update's rollout in events.jsonl
    costs    the learner's spans in events.jsonl, by least squares (costs.py)
    interference   warm-up updates of a comparison (interference.py)

Called by tools/simulate.py and tools/compare.py. Refuses (UserError) a run that kept neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.errors import UserError
from megathunder.metrics.row import MetricsRow, read_rows
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.spans import Span, read_spans
from megathunder.metrics.trajectories import TrajectoryRecord, read_trajectories
from megathunder.simulator.costs import CostModel, fit_costs
from megathunder.simulator.interference import Interference, measure_interference
from megathunder.simulator.predict import RecordedUpdate
from megathunder.simulator.traces import AttemptTrace, TurnTrace, UpdateTrace
from megathunder.tracing import LEARNER_LANES, UPDATE_LANE
from megathunder.types import Role

Keep = Callable[[MetricsRow], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Recorded updates, and what a cell's work costs, fitted to its spans."""

    config: Config
    updates: tuple[RecordedUpdate, ...]
    costs: CostModel
    interference: Interference
    cells: int


def read_recorded_run(folder: RunFolder, *, trace: Keep, cost: Keep, warm_up: Keep = lambda row: False) -> RecordedRun:
    """Traces of the updates whose row passes `trace`, costs from those that pass `cost`, interference from those that
    pass `warm_up`."""
    rows, spans = read_rows(folder.metrics), read_spans(folder.events)
    updates = tuple(recorded_updates(folder, [row for row in rows if trace(row)], spans))
    if not updates:
        raise UserError(
            f"no update of {folder.path} has trajectories and spans",
            expected="metrics.jsonl, trajectories/update_*.jsonl and events.jsonl, as a run writes them",
            remedy="give runs/<name> of a run with metrics.trajectories = true and metrics.events = true",
        )
    wanted = {row.update for row in rows if cost(row)}
    work = [s for s in spans if s.lane.startswith(LEARNER_LANES) and s.update in wanted]
    items = [(s.tokens, s.end_s - s.start_s) for s in work if s.name == "differentiate"]
    folds = [s.end_s - s.start_s for s in work if s.name == "fold"]
    costs = fit_costs(items, fold_s=sum(folds) / len(folds) if folds else 0.0)
    cells = len({s.lane for s in work}) or 1
    interference = measure_interference([row for row in rows if warm_up(row)], spans, costs)
    return RecordedRun(
        config=folder.read_config(), updates=updates, costs=costs, interference=interference, cells=cells
    )


def recorded_updates(folder: RunFolder, rows: list[MetricsRow], spans: list[Span]) -> Iterator[RecordedUpdate]:
    """The updates of `rows` whose trajectories and spans were kept."""
    starts = {s.update: s.start_s for s in spans if s.lane == UPDATE_LANE and s.name == "rollout"}
    for row in rows:
        path = folder.trajectories_of(row.update)
        if row.update in starts and path.is_file():
            attempts = tuple(attempt_trace(r, starts[row.update]) for r in read_trajectories(path))
            yield RecordedUpdate(
                update=row.update,
                schedule=row.schedule,
                trace=UpdateTrace(attempts=attempts, suffix_s=row.suffix_s),
                step_wall_s=row.step_wall_s,
            )


def attempt_trace(record: TrajectoryRecord, start_s: float) -> AttemptTrace:
    """Times of one recorded trajectory, from the start of its update."""
    trajectory = record.trajectory
    if trajectory is None:
        at = max((t.completed_s for t in record.turns), default=start_s) - start_s
        return AttemptTrace(group=record.id.group, index=record.id.index, turns=(), completed_s=at, lost_s=at)
    end_s = trajectory.completed_s - start_s
    rewarded_s = None if record.rewarded_s is None else max(record.rewarded_s - start_s, end_s)
    return AttemptTrace(
        group=record.id.group,
        index=record.id.index,
        turns=tuple(_turns(record, start_s, end_s)),
        completed_s=end_s,
        reward=record.reward,
        rewarded_s=rewarded_s,
        lost_s=end_s if record.lost else None,
    )


def _turns(record: TrajectoryRecord, start_s: float, end_s: float) -> Iterator[TurnTrace]:
    assert record.trajectory is not None
    times = {turn.turn: turn for turn in record.turns}
    number = 0
    for row_number, row in enumerate(record.trajectory.rows):
        before = 0
        for segment in row.segments:
            if segment.role is not Role.ACTION:
                before += len(segment.token_ids)
                continue
            known = times.get(number)
            yield TurnTrace(
                context_tokens=before,
                action_tokens=len(segment.token_ids),
                completed_s=min(known.completed_s - start_s, end_s) if known else end_s,
                scored_s=known.scored_s - start_s if known and known.scored_s is not None else None,
                row=row_number,
            )
            before, number = 0, number + 1
