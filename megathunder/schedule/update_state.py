"""The state of one update, which events (`events.py`) and answers (`answers.py`) alone change, and what it says.

    events  ----> UpdateState ----> next_work (pure) ----> answers.start ----> command
    answers ---->      |
                       +----> survivors, loss, tokens by lag: the figures of the update

Owned by one scheduler. Refuses (StalePolicyError) tokens of a policy version that the schedule does not train on.
"""

from __future__ import annotations

import math
from collections import Counter

from megathunder.config.root import Config
from megathunder.errors import IllegalMove
from megathunder.objectives.base import Objective, Survivor, Unit
from megathunder.schedule.gates import Gates
from megathunder.schedule.ledger import Drop, Ledger
from megathunder.schedule.lifecycle import Phase, State, moved
from megathunder.schedule.ready_queues import ReadyQueues
from megathunder.schedule.schedules import find_rule
from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.schedule.work_items import WorkItem
from megathunder.types import Segment, TrajectoryId


class UpdateState:
    """Groups, trajectories, chains and the ledger of update `update` at policy version `policy_version`."""

    def __init__(self, config: Config, objective: Objective, update: int, policy_version: int, cells: int) -> None:
        self.objective, self.rule = objective, find_rule(config.schedule)
        self.streaming = config.streaming
        self.exact = config.learner.accumulator == "exact"
        self.update, self.policy_version, self.cells = update, policy_version, cells
        self.ledger = Ledger()
        self.groups: list[Group] = []
        self.queues = ReadyQueues()
        self.gates = Gates(
            cells=cells,
            max_open_groups=config.streaming.max_open_groups,
            # With an accumulator for every trajectory admission counts groups, so that an open one can always close.
            max_trajectories=None if objective.keeps_each_gradient else self.streaming.max_per_trajectory_accumulators,
        )
        self.tokens_by_lag: Counter[int] = Counter()
        self.direct_loss = 0.0  # of what went to the batch, coefficients included
        self.replacements_due = 0
        self.replacements_left = config.grpo.max_replacements if objective.replaces_equal_groups else 0
        self.items: dict[int, WorkItem] = {}
        self.last_item = update << 20
        self.all_released = False  # what `batch_ended` was when queues were last filled
        self._phases: Counter[Phase] = Counter()
        self._trajectories: dict[TrajectoryId, TrajectoryState] = {}

    # ------------------------------------------------------------------------------------------ membership

    def add_group(self, size: int) -> Group:
        """Register a group of `size` trajectories."""
        weights = self.objective.opening_weights() if self.by_trajectory else None
        group = Group(index=len(self.groups), weights=weights, fixed_weights=weights is not None)
        self.groups.append(group)
        for index in range(size):
            trajectory = TrajectoryState(id=TrajectoryId(self.update, group.index, index), group=group)
            group.trajectories.append(trajectory)
            self._trajectories[trajectory.id] = trajectory
            if self.by_trajectory:
                self.ledger.register(trajectory.source)
        self._phases[Phase.SAMPLING] += size
        return group

    def trajectory(self, identity: TrajectoryId, event: str) -> TrajectoryState:
        """The trajectory that an event speaks of; IllegalMove where this update did not ask for it."""
        found = self._trajectories.get(TrajectoryId(*identity))
        if found is None:
            raise IllegalMove(f"{event} of {TrajectoryId(*identity)}, which update {self.update} did not ask for")
        return found

    def move(self, trajectory: TrajectoryState, to: Phase) -> None:
        self._phases[trajectory.phase] -= 1
        trajectory.phase = moved(trajectory.phase, to, trajectory.id)
        self._phases[to] += 1

    # ------------------------------------------------------------------------------------------ release

    @property
    def by_trajectory(self) -> bool:
        """Contributions are trajectories, whose weights their rewards decide; else turns."""
        return self.objective.unit is Unit.TRAJECTORY

    @property
    def all_ended(self) -> bool:
        """No trajectory is sampled any more."""
        return self._phases[Phase.SAMPLING] == 0

    @property
    def batch_ended(self) -> bool:
        """Nothing more is needed from outside."""
        settled = self._phases[Phase.SETTLED] + self._phases[Phase.LOST]
        return settled == len(self._trajectories) and self.replacements_due == 0

    def released(self, trajectory: TrajectoryState) -> bool:
        return self.rule.released(group_ended=trajectory.group.closed, batch_ended=self.batch_ended)

    def folds_at_closure(self, group: Group) -> bool:
        """Weights are applied at the closure alone, also where they are known earlier: exact sums, SALT."""
        return (self.exact or self.objective.keeps_each_gradient) and not group.fixed_weights

    @property
    def finished(self) -> bool:
        """Every trajectory has ended, every contribution is folded or dropped, every accumulator is free."""
        idle = not self.queues and not self.items and self.gates.none_open
        return self.all_ended and self.replacements_due == 0 and self.ledger.settled and idle

    def count_tokens(self, segments: tuple[Segment, ...], *, count: bool) -> None:
        """Check the policy versions of sampled tokens, and count them by lag."""
        for segment in segments:
            for version, tokens in Counter(segment.policy_versions).items():
                lag = self.rule.lag(version, self.policy_version)
                self.tokens_by_lag[lag] += tokens * count

    # ------------------------------------------------------------------------------------------ figures

    @property
    def survivors(self) -> list[Survivor]:
        """Trajectories that count in the normaliser, those whose weight is 0 included."""
        groups = [g for g in self.groups if g.counts]
        if self.by_trajectory:
            return [self._survivor(g, t) for g in groups for t in g.survivors]
        lengths = [t.trained_tokens for g in groups for t in g.trajectories]
        return [Survivor(trained_tokens=n) for n in lengths if n]

    @staticmethod
    def _survivor(group: Group, trajectory: TrajectoryState) -> Survivor:
        signal, rollout = trajectory.signal, trajectory.rollout
        weight = group.weights.weight(signal) if group.weights and signal is not None else 0.0
        return Survivor(trained_tokens=rollout.sampled_tokens if rollout else 0, signal=signal or (), weight=weight)

    @property
    def groups_without_signal(self) -> int:
        """Closed groups with survivors, all of whose advantages are 0."""
        if not self.by_trajectory:
            return 0
        closed = [g for g in self.groups if g.closed and g.dropped is not Drop.GROUP_DROPPED and g.survivors]
        return sum(not any(self._survivor(g, t).weight for t in g.survivors) for g in closed)

    @property
    def loss_sum(self) -> float:
        """Loss of what is in the batch so far: what waits in accumulators counts with its group's weights, and not at
        all before they are known or where nothing of it is wanted."""
        held = ((g.weights, c) for g in self.groups if g.weights for c in g.chains if not c.abandoned)
        weighed = (w.weight(c.trajectory.signal) * c.held_loss for w, c in held if c.trajectory.signal is not None)
        return self.direct_loss + math.fsum(weighed)

    def dropped(self, chain: Chain) -> bool:
        """Nothing of the chain is in the step."""
        return chain.abandoned or all(self.ledger.state(source) is State.DROPPED for source in chain.sources)

    def applied_tokens(self, chain: Chain) -> int:
        """Sampled tokens of the chain's contributions that are APPLIED."""
        if chain.abandoned:
            return 0
        applied = [self.ledger.state(source) is State.APPLIED for source in chain.sources]
        if self.by_trajectory:
            return chain.tokens.trained_tokens() if all(applied) else 0
        return sum(chain.tokens.trained_tokens(turn, turn + 1) for turn, is_in in enumerate(applied) if is_in)
