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
    TrajectoryCompleted   content-ready backward; replay of a chain          Differentiate(per_trajectory | batch)
                          comparison with the reference (KL in reward)       Score
    Rewarded              backward; its accumulator moves                    Differentiate(class | moment | batch), Fold
    the group's last      closure                                            Fold(all -> batch)
    TrajectoryLost        discard of its own; closure over the survivors     Fold(free)

Pure: no clock, no I/O, no randomness; `now` is whatever clock the caller has, in seconds. Called by loop.py and
simulator/. Refuses what events.py, answers.py and lifecycle.py refuse.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.objectives.base import Objective
from megathunder.objectives.build_objective import build_objective
from megathunder.schedule.answers import apply_answer, start
from megathunder.schedule.events import apply_event
from megathunder.schedule.ledger import Drop, Ledger, LedgerCounts
from megathunder.schedule.next_work import WorkRules, next_ahead, next_work
from megathunder.schedule.step_planner import refresh
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_counts import CellClock, CellTime, Idle
from megathunder.schedule.work_items import WorkItem
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
    pull; `objective` goes on from update to update, and is built from `config` where it is not given."""

    def __init__(
        self,
        config: Config,
        update: int,
        policy_version: int,
        group_sizes: Iterable[int],
        cells: int = 1,
        objective: Objective | None = None,
    ) -> None:
        self._state = UpdateState(config, objective or build_objective(config), update, policy_version, cells)
        self._rules = WorkRules.of(config)
        self._clocks = [CellClock() for _ in range(cells)]
        for size in group_sizes:
            self._state.add_group(size)

    # ------------------------------------------------------------------------------------------ driving

    def on_event(self, event: Event, now: float) -> None:
        """A rollout event; raises StalePolicyError, IllegalMove or InfrastructureFailure (on_lost = "fail")."""
        apply_event(self._state, event)

    def next_work(self, cell: int, now: float) -> Differentiate | Fold | Score | None:
        """Work for the free cell `cell`, or None while there is none; ask again after any event or answer."""
        self._clocks[cell].on_request(now)
        item = next_work(self._state, self._rules, cell)
        if isinstance(item, Idle):
            self._clocks[cell].on_refusal(now, item)
            return None
        return self._start(cell, item)

    def next_ahead(self, cell: int, now: float) -> Differentiate | Fold | Score | None:
        """Work that `cell`, which has one command in hand, does next; None where it is better to wait."""
        item = next_ahead(self._state, self._rules, cell)
        return None if item is None else self._start(cell, item)

    def _start(self, cell: int, item: WorkItem) -> Differentiate | Fold | Score:
        self._clocks[cell].on_start()
        return start(self._state, item, prompt_affinity=self._rules.prompt_affinity)

    def on_done(self, done: Done, now: float) -> None:
        """A cell's answer to a command of this scheduler."""
        self._clocks[done.cell].on_answer(now)
        apply_answer(self._state, done)

    def on_step(self, stepped: bool) -> None:
        """The barrier was passed: contributions are APPLIED, or DROPPED where no step was taken."""
        if stepped:
            self.ledger.apply()
        else:
            self.ledger.abandon(Drop.NO_STEP)
        self._state.objective.end_update(self._state.survivors)

    # ------------------------------------------------------------------------------------------ dynamic sampling

    def needs_replacement(self) -> int:
        """Groups to sample in the place of groups that closed with equal rewards (grpo.dynamic_sampling)."""
        return self._state.replacements_due

    def add_group(self, size: int) -> int:
        """Register a replacement group of `size` trajectories; the group index its events must carry."""
        self._state.replacements_due -= 1
        group = self._state.add_group(size)
        refresh(self._state, (group,))
        return group.index

    def decline_replacements(self) -> None:
        """No task is left to replace a group with: the update goes on without."""
        self._state.replacements_due = 0
        refresh(self._state, ())

    # ------------------------------------------------------------------------------------------ result

    @property
    def finished(self) -> bool:
        """Every trajectory has ended, every contribution is folded or dropped, every accumulator is free."""
        return self._state.finished

    @property
    def normaliser(self) -> float:
        """Z of the batch, from its survivors (those of zero advantage included)."""
        return self._state.objective.normaliser(self._state.survivors)

    @property
    def skip(self) -> bool:
        """No gradient at all: every group had equal rewards, or nothing survived."""
        return self.ledger.counts.folded == 0 or self.normaliser == 0.0

    @property
    def objective(self) -> Objective:
        return self._state.objective

    @property
    def ledger(self) -> Ledger:
        return self._state.ledger

    def counts_in_statistics(self, group: int) -> bool:
        """Whether group `group` is part of the batch: it was not replaced, nor dropped as a whole."""
        return self._state.groups[group].counts

    def cell_time(self, cell: int) -> CellTime:
        return self._clocks[cell].time

    @property
    def report(self) -> ScheduleReport:
        """Counts and times so far."""
        state, times = self._state, [clock.time for clock in self._clocks]
        chains = [c for g in state.groups for c in g.chains]
        return ScheduleReport(
            counts=self.ledger.counts,
            busy_s=sum(t.busy_s for t in times),
            idle_s=sum(t.idle_s for t in times),
            blocked_s=sum(t.blocked_s for t in times),
            computed_tokens=sum(c.spent_tokens for c in chains),
            wasted_tokens=sum(c.spent_tokens for c in chains if state.dropped(c)),
            trained_tokens=sum(state.applied_tokens(c) for c in chains),
            loss_sum=state.loss_sum,
            peak_open_groups=state.gates.peak_open,
            trajectories_lost=sum(t.lost for g in state.groups for t in g.trajectories),
            groups_zero_advantage=state.groups_without_signal,
            tokens_by_lag=tuple(sorted(state.tokens_by_lag.items())),
        )
