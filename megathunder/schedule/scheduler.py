"""`UpdateScheduler`: one update as a state machine, driven identically by the live loop, by tests and by the simulator.

    scheduler = UpdateScheduler(config, update, policy_version, group_sizes, cells)
    whenever an event arrives        scheduler.on_event(event, now)
    whenever a cell finishes         scheduler.on_done(done, now)
    after either, each free cell     command = scheduler.next_work(cell, now)      Differentiate | Fold | None
    then each cell with one in hand  command = scheduler.next_ahead(cell, now)     the same, done after that
    until                            scheduler.finished
    then the barrier                 TakeStep(normaliser=scheduler.normaliser, skip=scheduler.skip), on_step(stepped)

    event                 may make runnable                                  command (accumulator)
    TurnCompleted         forward of the turn (release turn_forward)         Differentiate(last=False)
    TurnScored            backward of the turn or trajectory (OPD)           Differentiate(batch)
    TrajectoryCompleted   content-ready backward; replay of a chain          Differentiate(own | batch)
                          comparison with the reference (KL in reward)       Score
    Rewarded              backward; landing of an own                        Differentiate(class | moment | batch), Fold
    the group's last      closure                                            Fold(class, moment, own -> batch)
    TrajectoryLost        discard of an own; closure over the survivors      Fold(free)

Pure: no clock, no I/O, no randomness; `now` is whatever clock the caller has, in seconds. Called by loop.py and
simulator/. Refuses what update_state.py and lifecycle.py refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.schedule.dispatcher import Dispatcher
from megathunder.schedule.ledger import Drop, Ledger, LedgerCounts
from megathunder.schedule.state import Chain
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_counts import CellClock, CellTime
from megathunder.types import Differentiate, Done, Event, Fold, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReport:
    """What an update's schedule did. Seconds are sums over cells; `computed_tokens` are those that the cells say
    they computed, `wasted_tokens` the ones among them for what ended DROPPED. `trained_tokens` are the sampled ones of
    APPLIED contributions, `loss_sum` is the loss whose gradient is in the batch, before the normaliser."""

    counts: LedgerCounts
    busy_s: float
    idle_s: float
    blocked_s: float
    computed_tokens: int
    wasted_tokens: int
    trained_tokens: int
    loss_sum: float
    peak_open_groups: int
    trajectories_lost: int
    groups_zero_advantage: int
    tokens_by_lag: tuple[tuple[int, int], ...]
    """(lag, sampled tokens), the zero-staleness certificate."""

    @property
    def wasted_share(self) -> float:
        return self.wasted_tokens / self.computed_tokens if self.computed_tokens else 0.0

    @property
    def policy_lag_max(self) -> int:
        return max((lag for lag, n in self.tokens_by_lag if n), default=0)


class UpdateScheduler:
    """See the module docstring. `group_sizes` are the trajectories of each group; `cells` how many learner cells
    pull."""

    def __init__(
        self, config: Config, update: int, policy_version: int, group_sizes: Iterable[int], cells: int = 1
    ) -> None:
        self._state = UpdateState(config, update, policy_version, self._place)
        self._dispatcher = Dispatcher(config, self._state, cells)
        self._clocks = [CellClock() for _ in range(cells)]
        for size in group_sizes:
            self._state.add_group(size)

    def _place(self, chain: Chain) -> None:
        self._dispatcher.place(chain)

    # ------------------------------------------------------------------------------------------ driving

    def on_event(self, event: Event, now: float) -> None:
        """A rollout event; raises StalePolicyError, IllegalMove or InfrastructureFailure (on_lost = "fail")."""
        self._state.apply_event(event)

    def next_work(self, cell: int, now: float) -> Differentiate | Fold | Score | None:
        """Work for the free cell `cell`, or None while there is none; ask again after any event or answer."""
        self._clocks[cell].asked(now)
        command = self._dispatcher.next_work(cell)
        if command is None:
            self._clocks[cell].refused(now, self._dispatcher.refusal)
        else:
            self._clocks[cell].given()
        return command

    def next_ahead(self, cell: int, now: float) -> Differentiate | Fold | None:
        """Work that `cell`, which has one command in hand, does next; None where it is better to wait."""
        command = self._dispatcher.next_ahead(cell)
        if command is not None:
            self._clocks[cell].given()
        return command

    def on_done(self, done: Done, now: float) -> None:
        """A cell's answer to a command of this scheduler."""
        self._clocks[done.cell].answered(now)
        self._dispatcher.on_done(done)

    def on_step(self, stepped: bool) -> None:
        """The barrier was passed: contributions are APPLIED, or DROPPED where no step was taken."""
        if stepped:
            self._state.ledger.apply()
        else:
            self._state.ledger.abandon(Drop.NO_STEP)

    # ------------------------------------------------------------------------------------------ dynamic sampling

    def needs_replacement(self) -> int:
        """Groups to sample in the place of groups that closed with equal rewards (grpo.dynamic_sampling)."""
        return self._state.replacements_due

    def add_group(self, size: int) -> int:
        """Register a replacement group of `size` trajectories; the group index its events must carry."""
        self._state.replacements_due -= 1
        return self._state.add_group(size)

    def decline_replacements(self) -> None:
        """No task is left to replace a group with: the update goes on without."""
        self._state.replacements_due = 0
        if self._state.batch_ended:
            self._state.place_all()

    # ------------------------------------------------------------------------------------------ result

    @property
    def finished(self) -> bool:
        """Every trajectory has ended, every contribution is folded or dropped, every accumulator is free."""
        state = self._state
        return state.unended == 0 and state.replacements_due == 0 and state.ledger.settled and self._dispatcher.idle

    @property
    def normaliser(self) -> float:
        """Z of the batch, from its survivors (those of zero advantage included)."""
        return self._state.objective.normaliser(self._state.survivors)

    @property
    def skip(self) -> bool:
        """No gradient at all: every group had equal rewards, or nothing survived."""
        return self._state.ledger.counts.folded == 0 or self.normaliser == 0.0

    @property
    def ledger(self) -> Ledger:
        return self._state.ledger

    def cell_time(self, cell: int) -> CellTime:
        return self._clocks[cell].time

    @property
    def report(self) -> ScheduleReport:
        """Counts and times so far."""
        times = [clock.time for clock in self._clocks]
        chains = [c for g in self._state.groups for c in g.chains]
        attempts = [a for g in self._state.groups for a in g.attempts]
        zero = [g for g in self._state.groups if g.closed and g.coefficients is None and self._state.grouped]
        return ScheduleReport(
            counts=self.ledger.counts,
            busy_s=sum(t.busy_s for t in times),
            idle_s=sum(t.idle_s for t in times),
            blocked_s=sum(t.blocked_s for t in times),
            computed_tokens=sum(c.spent_tokens for c in chains),
            wasted_tokens=sum(c.spent_tokens for c in chains if self._state.dropped(c)),
            trained_tokens=sum(self._state.applied_tokens(c) for c in chains),
            loss_sum=self._state.loss_sum,
            peak_open_groups=self._dispatcher.gates.peak_open,
            trajectories_lost=sum(a.lost for a in attempts),
            groups_zero_advantage=len(zero),
            tokens_by_lag=tuple(sorted(self._state.tokens_by_lag.items())),
        )
