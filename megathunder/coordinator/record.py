"""Measures one update: when its four instants were, what its work added up to, and the row that says so.

    first request .. last reward or score .. end of the last backward .. last acknowledgement
    |-- rollout --------------------------|-- tail ------------------|-- suffix ----------|

Called by the coordinator. Reads clocks and counts; changes nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megathunder import tracing
from megathunder.config import Config
from megathunder.config.model_shape import ModelShape
from megathunder.coordinator.rollouts import Rollouts
from megathunder.metrics.aggregate import Clock, Outcome, UpdateTally
from megathunder.metrics.console import Progress
from megathunder.metrics.row import MetricsRow, Sizing
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.types import Command, Differentiate, Done, Event, Fold, Publish, Score, TakeStep

log = logging.getLogger(__name__)
NAMES = {Differentiate: "differentiate", Fold: "fold", Score: "score", TakeStep: "step", Publish: "publish"}


class UpdateRecord:
    """The measurements of one update, from its first request on."""

    def __init__(
        self, config: Config, rollouts: Rollouts, *, schedule: str, shape: ModelShape, cells: int, peak_flops: float
    ) -> None:
        self._config, self._rollouts = config, rollouts
        self._tally = UpdateTally(
            update=rollouts.update,
            schedule=schedule,
            objective=config.objective,
            policy_version=rollouts.policy_version,
            sampled_version=rollouts.policy_version,
            shape=shape,
            cells=cells,
            peak_flops=peak_flops,
            recompute=config.learner.recompute == "full",
        )
        self._last_backward_s = 0.0
        self._acknowledged_s = 0.0
        self._begins_s = rollouts.started_s
        self._phase = "rollout"

    def set_policy_version(self, version: int) -> None:
        """The learner's version when this update is trained on: lags count from it."""
        self._tally.policy_version = version

    def work(self, command: Command, done: Done) -> None:
        """A cell has done `command`."""
        self._tally.work(command, done)
        self._name_gaps(done)
        if isinstance(command, Differentiate | Fold):
            self._last_backward_s = max(self._last_backward_s, done.ended_s)
        tracing.record(
            tracing.learner_lane(done.cell),
            NAMES.get(type(command), type(command).__name__),
            done.started_s,
            done.ended_s,
            update=self._rollouts.update,
            tokens=done.stats.tokens,
        )

    def _name_gaps(self, done: Done) -> None:
        limit = self._config.learner.max_logprob_gap
        for gap in done.stats.logprob_gaps:
            dropped = bool(limit) and gap.nats > limit
            log.warning(
                "%s: engine and learner are %.1f nats apart on a token (learner.logprob_gap_alarm = %g); the row is %s",
                *(gap.source, gap.nats, self._config.learner.logprob_gap_alarm),
                "not trained" if dropped else "trained: learner.max_logprob_gap drops such rows",
            )

    def event(self, event: Event) -> None:
        """A rollout event of this update."""
        self._tally.note(event)

    @property
    def rollouts(self) -> Rollouts:
        return self._rollouts

    @property
    def phase(self) -> str:
        return self._phase

    def set_phase(self, phase: str) -> None:
        """What the update is busy with, for the display."""
        self._phase = phase

    def acknowledged(self) -> float:
        """The last server has acknowledged the new version: the update ends. The instant."""
        self._acknowledged_s = time.monotonic()
        return self._acknowledged_s

    def set_start(self, acknowledged_s: float) -> None:
        """The previous update ended then. Rollouts sampled ahead began earlier: their update counts from that end, so
        that steps never overlap and the steady state is measured from acknowledgement to acknowledgement."""
        self._begins_s = max(self._begins_s, acknowledged_s)

    def progress(self, scheduler: UpdateScheduler) -> Progress:
        """Where the update stands."""
        rewards = [t.reward for t in self._rollouts.trajectories.values() if t.reward is not None]
        counts = scheduler.ledger.counts
        done = len(self._rollouts.trajectories) + len(self._rollouts.lost)
        tail = self._phase == "rollout" and done == self._rollouts.expected
        return Progress(
            update=self._rollouts.update,
            updates=self._config.run.updates,
            phase="tail" if tail else self._phase,
            elapsed_s=time.monotonic() - self._rollouts.started_s,
            trajectories_done=done,
            trajectories=self._rollouts.expected,
            contributions_done=counts.folded + counts.applied + counts.dropped,
            contributions=counts.registered,
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
        )

    def row(
        self,
        scheduler: UpdateScheduler,
        *,
        heldout: float | None,
        since_start_s: float,
        hours_before: float,
        devices: int,
        sizing: Sizing | None = None,
    ) -> MetricsRow:
        """The row of the finished update; also records its phases in the trace."""
        rollouts, report = self._rollouts, scheduler.report
        for trajectory in rollouts.trajectories.values():
            group, index = trajectory.id.group, trajectory.id.index
            counts = scheduler.counts_in_statistics(group)
            self._tally.trajectory(trajectory, kind=rollouts.groups[group][index].kind, counts=counts)
        clock = Clock(
            first_request_s=self._begins_s,
            last_signal_s=max(rollouts.last_reward_at_s, self._begins_s),
            last_backward_s=self._last_backward_s,
            acknowledged_s=self._acknowledged_s,
        )
        _trace_phases(clock, rollouts.update)
        outcome = Outcome(
            contributions_applied=report.counts.applied,
            dropped_by_reason=report.counts.dropped_by_reason,
            groups_degenerate=report.groups_zero_advantage,
            normaliser=scheduler.normaliser,
            since_start_s=since_start_s,
            wasted_tokens=report.wasted_tokens,
            trained_tokens=report.trained_tokens,
            loss_sum=report.loss_sum,
            success_heldout=heldout,
            idle_s=report.idle_s,
            blocked_s=report.blocked_s,
            open_groups_peak=report.peak_open_groups,
            trajectories_lost=report.trajectories_lost,
            hours_before=hours_before,
            devices=devices,
            sizing=sizing,
        )
        return self._tally.row(clock, outcome)


def _trace_phases(clock: Clock, update: int) -> None:
    instants: Sequence[tuple[str, float, float]] = (
        ("rollout", clock.first_request_s, clock.last_signal_s),
        ("tail", clock.last_signal_s, clock.learned_s),
        ("suffix", clock.learned_s, clock.acknowledged_s),
    )
    for name, start_s, end_s in instants:
        tracing.record(tracing.UPDATE_LANE, name, start_s, end_s, update=update)
