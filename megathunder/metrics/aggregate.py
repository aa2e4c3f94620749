"""From what happened to one row: sums over sums, min of mins, maxima of maxima; never a mean of means.

    tally = UpdateTally(...)
    tally.trajectory(t)           every trajectory that counts, once its reward is known (OPD: complete)
    tally.note(event)             every rollout event (for what the teacher says of the turns)
    tally.work(command, done)     every Done of a cell, with the command it answers
    tally.row(clock, outcome)     the MetricsRow

Called by the coordinator; everything here is plain numbers, so a layout or a packing cannot change a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megathunder.config.model_shape import ModelShape
from megathunder.metrics.row import MetricsRow, Salt, Sizing
from megathunder.metrics.summary import Summary
from megathunder.metrics.trajectory_tally import TrajectoryTally
from megathunder.planning.flops import Flops, row_flops, utilisation
from megathunder.types import (
    Command,
    Differentiate,
    Done,
    Event,
    Publish,
    Score,
    TakeStep,
    Trajectory,
    TrajectoryId,
    TurnCompleted,
    TurnScored,
)
from megathunder.work_stats import SaltStats, WorkStats


def combine(stats: Iterable[WorkStats]) -> WorkStats:
    """One WorkStats of several commands, cells or ranks."""
    return sum(stats, WorkStats())


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The four instants of an update, `time.monotonic` seconds of the coordinator's host."""

    first_request_s: float
    last_signal_s: float
    """Last reward or teacher score."""
    last_backward_s: float
    """End of the last backward pass or fold; earlier than the last signal where nothing was left to do."""
    acknowledged_s: float
    """Last server's acknowledgement of the new version."""

    @property
    def learned_s(self) -> float:
        return max(self.last_signal_s, self.last_backward_s)

    @property
    def rollout_s(self) -> float:
        return self.last_signal_s - self.first_request_s

    @property
    def tail_s(self) -> float:
        return self.learned_s - self.last_signal_s

    @property
    def suffix_s(self) -> float:
        return self.acknowledged_s - self.learned_s

    @property
    def step_wall_s(self) -> float:
        return self.acknowledged_s - self.first_request_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ledger says at the barrier, and what was measured beside the update. A field that the row has as well is
    the row's."""

    contributions_applied: int
    dropped_by_reason: Mapping[str, int]
    groups_degenerate: int
    normaliser: float
    since_start_s: float
    wasted_tokens: int = 0
    """Tokens the learner computed for degenerate groups and dropped contributions."""
    trained_tokens: int = 0
    """Sampled tokens of the contributions in the step."""
    loss_sum: float = 0.0
    """Sum over rows of coefficient * scale * sum_t weight * (-log p), of the batch that was offered to the step."""
    success_heldout: float | None = None
    idle_s: float | None = None
    """Sum over cells, as `blocked_s`."""
    blocked_s: float | None = None
    open_groups_peak: int | None = None
    trajectories_lost: int | None = None
    hours_before: float = 0.0
    """Device-hours of the updates before this one."""
    devices: int = 1
    """GPUs, or machines, that the run holds."""
    sizing: Sizing | None = None


@dataclass(slots=True, kw_only=True)
class UpdateTally:
    """Sums of one update while it runs. `peak_flops` is of all learner ranks together; 0: unknown."""

    update: int
    schedule: str
    objective: str
    policy_version: int
    shape: ModelShape | None = None
    cells: int = 1
    peak_flops: float = 0.0
    recompute: bool = False
    sampled_version: int | None = None
    """Of the policy that sampled; None: `policy_version`, that of the policy that learns."""
    _trajectories: TrajectoryTally = field(default_factory=TrajectoryTally)
    _work: WorkStats = field(default_factory=WorkStats)
    _step: WorkStats = field(default_factory=WorkStats)
    _publication: WorkStats = field(default_factory=WorkStats)
    _publication_s: Summary = field(default_factory=Summary)
    _turns_unscored: dict[tuple[TrajectoryId, int], tuple[float, ...]] = field(default_factory=dict)
    _teacher_kl: Summary = field(default_factory=Summary)
    _context_tokens: int = 0
    _cached_tokens: int = 0
    _divergence: Summary = field(default_factory=Summary)
    _busy_s: float = 0.0
    _flops: Flops = field(default_factory=Flops)

    def trajectory(self, trajectory: Trajectory, *, kind: str = "", counts: bool = True) -> None:
        """A sampled trajectory of a task of `kind`; `counts`: its group was neither replaced nor dropped, so that its
        reward is one of the batch."""
        self._trajectories.add(trajectory, kind=kind, counts=counts)

    def note(self, event: Event) -> None:
        """A rollout event; a turn and its scores together give the divergence from the teacher."""
        if isinstance(event, TurnCompleted):
            self._turns_unscored[event.id, event.turn] = event.segments[-1].logprobs
            self._context_tokens += event.context_tokens
            self._cached_tokens += event.cached_tokens
        elif isinstance(event, TurnScored):
            sampled = self._turns_unscored.pop((event.id, event.turn))
            gaps = (p - q for p, q in zip(sampled, event.teacher_logprobs, strict=True))
            self._teacher_kl += Summary.of(gaps)

    def work(self, command: Command, done: Done) -> None:
        """A cell has done `command`. Barrier commands are to be given once for each cell that answers."""
        seconds = done.ended_s - done.started_s
        if isinstance(command, Publish):
            self._publication = combine((self._publication, done.stats))
            self._publication_s += Summary.of([seconds])
            return
        self._busy_s += seconds
        if isinstance(command, TakeStep):
            self._step = combine((self._step, done.stats))
            return
        self._work = combine((self._work, done.stats))
        if isinstance(command, Score):
            self._divergence += Summary.of(done.stats.divergences)
        if self.shape is not None and isinstance(command, Differentiate):
            for row in command.rows:
                whole = command.last and not row.context_tokens
                self._flops += row_flops(self.shape, row, recompute=self.recompute, whole=whole)

    def _kl(self, normaliser: float) -> float | None:
        if self._divergence.count:
            return self._divergence.sum / max(self._trajectories.sampled_tokens, 1)
        term = self._work.kl_sum
        return None if term is None else term / normaliser if normaliser else 0.0

    def row(self, clock: Clock, outcome: Outcome) -> MetricsRow:
        """The row of this update; the fields of each part are those of the row by the same name."""
        whole = self._work + self._step
        return MetricsRow(
            update=self.update,
            schedule=self.schedule,
            objective=self.objective,
            policy_version=self.policy_version if self.sampled_version is None else self.sampled_version,
            teacher_kl=self._teacher_kl.mean if self._teacher_kl.count else None,
            context_tokens=self._context_tokens or None,
            cached_tokens=self._cached_tokens if self._context_tokens else None,
            prompt_tokens_saved=whole.prompt_tokens_saved,
            kl_to_reference=self._kl(outcome.normaliser),
            salt=_salt(whole.salt),
            **_shared(clock),
            **self._trajectories.fields(self.policy_version),
            **self._outcome(clock, outcome),
            **self._learning(outcome),
            **self._cost(clock),
        )

    def _outcome(self, clock: Clock, outcome: Outcome) -> dict[str, object]:
        """What the ledger says; per cell where it adds up over cells."""
        per_cell = {"learner_idle_s": outcome.idle_s, "learner_blocked_s": outcome.blocked_s}
        return {
            **_shared(outcome),
            **{name: None if total is None else total / self.cells for name, total in per_cell.items()},
            "contributions_dropped": sum(outcome.dropped_by_reason.values()),
            "wasted_share": outcome.wasted_tokens / self._work.tokens if self._work.tokens else 0.0,
            "device_hours": outcome.hours_before + clock.step_wall_s * outcome.devices / 3600,
        }

    def _learning(self, outcome: Outcome) -> dict[str, object]:
        """What the learner's cells did with the tokens, and the step."""
        work, step = self._work, self._step
        return {
            "differentiated_tokens": work.trained_tokens,
            "total_tokens": work.tokens,
            "engine_learner_logprob_diff_max": work.logprob_diff_max,
            "rows_above_gap_alarm": len(work.logprob_gaps),
            "engine_learner_logprob_diff_mean": work.logprob_diff_sum / max(work.trained_tokens, 1),
            "loss": outcome.loss_sum / outcome.normaliser if step.stepped and outcome.normaliser else None,
            **{name: getattr(step, name) for name in ("grad_norm", "learning_rate", "stepped", "skip_reason")},
        }

    def _cost(self, clock: Clock) -> dict[str, object]:
        """Seconds, operations and bytes."""
        work, step, busy_s = self._work, self._step, self._busy_s / self.cells
        flops = self._flops.total or work.flops
        beyond = work.flops - flops
        return {
            "publication_s": max(self._publication_s.maximum, 0.0),
            "learner_busy_s": busy_s,
            "learner_busy_share": busy_s / clock.step_wall_s if clock.step_wall_s > 0 else 0.0,
            "flops": flops,
            "replay_flops": beyond if beyond > 1e-9 * flops else 0.0,
            "recompute_flops": self._flops.recompute,
            "active_mfu": utilisation(flops, clock.step_wall_s, self.peak_flops),
            "compute_mfu": utilisation(flops, busy_s, self.peak_flops),
            "publication_bytes": self._publication.payload_bytes,
            "accumulator_bytes_peak": max(work.accumulator_bytes, step.accumulator_bytes),
            "host_memory_bytes": 0,  # the monitor's to fill in
            "exposed_copy_s": step.exposed_copy_s,
        }


def _shared(part: Clock | Outcome) -> dict[str, object]:
    """What `part` has under a name that the row has as well."""
    return {name: getattr(part, name) for name in MetricsRow.__struct_fields__ if hasattr(part, name)}


def _salt(sums: SaltStats | None) -> Salt | None:
    """The sums that the learner reports of its Gram matrices, as means."""
    if sums is None or not sums.geometries:
        return None
    return Salt(
        geometries=sums.geometries,
        cancellation=sums.cancellation / sums.geometries,
        cancellation_max=sums.cancellation_max,
        factor=sums.factor / sums.geometries,
        factor_max=sums.factor_max,
        rank=sums.rank / sums.geometries,
        spectrum=tuple(share / sums.geometries for share in sums.spectrum),
        sketch_error=sums.sketch_error / sums.sketched if sums.sketched else None,
    )
