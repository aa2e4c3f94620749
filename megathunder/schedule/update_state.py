"""The state of one update and what events do to it; the dispatcher reads it to find work.

    event                 effect
    TurnCompleted         a chain grows (turn releases, OPD); an action 0 again starts the trajectory anew
    TurnScored            its turn's weight is known
    TrajectoryCompleted   all chains are closed; COMPLETE
    Rewarded              REWARDED; the group may close
    TrajectoryLost        DROPPED (GRPO), or cut after its last scored turn (OPD); the group may close over survivors

A group closes when every trajectory is rewarded or lost: coefficients, or nothing to do at all where rewards are equal.
Every chain that may have become runnable is handed to `place`. Called by the scheduler. Refuses (IllegalMove) events of
unknown trajectories, turns out of order, a second and different reward, a loss after a reward; (StalePolicyError)
tokens of another policy version; (InfrastructureFailure) a loss under on_lost = "fail".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from megathunder.config.root import Config
from megathunder.errors import IllegalMove, InfrastructureFailure
from megathunder.objectives.advantage import ZERO, GroupStatistics
from megathunder.objectives.base import Survivor
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.grpo import Grpo
from megathunder.schedule.ledger import Drop, Ledger
from megathunder.schedule.lifecycle import State
from megathunder.schedule.schedules import RULES
from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.types import (
    Event,
    Rewarded,
    Role,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)


class UpdateState:
    """Groups, attempts, chains and the ledger of update `update` at policy version `policy_version`."""

    def __init__(self, config: Config, update: int, policy_version: int, place: Callable[[Chain], None]) -> None:
        self.objective = build_objective(config)
        self.rule = RULES[config.schedule]
        self.release = config.streaming.release
        self.update, self.policy_version = update, policy_version
        self.ledger = Ledger()
        self.groups: list[Group] = []
        self.tokens_by_lag: Counter[int] = Counter()
        self.direct_loss = 0.0  # of what went to the batch, coefficients included
        self.unresolved = 0
        self.unended = 0
        self.replacements_due = 0
        self._replacements_left = config.grpo.max_replacements if config.grpo.dynamic_sampling else 0
        self._dynamic = config.objective == "grpo" and config.grpo.dynamic_sampling
        self._on_lost = config.streaming.on_lost
        self._attempts: dict[TrajectoryId, TrajectoryState] = {}
        self._place = place

    # ------------------------------------------------------------------------------------------ membership

    def add_group(self, size: int) -> int:
        """Register a group of `size` trajectories; its index."""
        group = Group(index=len(self.groups))
        self.groups.append(group)
        for index in range(size):
            attempt = TrajectoryState(id=TrajectoryId(self.update, group.index, index), group=group)
            group.attempts.append(attempt)
            self._attempts[attempt.id] = attempt
            if self.grouped:
                self.ledger.register(attempt.source)
        self.unresolved += size
        self.unended += size
        return group.index

    @property
    def grouped(self) -> bool:
        return self.objective.grouped

    @property
    def batch_ended(self) -> bool:
        return self.unresolved == 0 and self.replacements_due == 0

    def released(self, attempt: TrajectoryState) -> bool:
        return self.rule.released(group_ended=attempt.group.closed, batch_ended=self.batch_ended)

    @property
    def survivors(self) -> list[Survivor]:
        """Trajectories that count in the normaliser, those whose advantage is 0 included."""
        groups = [g for g in self.groups if g.counts]
        if self.grouped:
            trajectories = [a.trajectory for g in groups for a in g.survivors if a.trajectory is not None]
            return [Survivor(trained_tokens=t.sampled_tokens) for t in trajectories]
        lengths = [a.trained_tokens for g in groups for a in g.attempts]
        return [Survivor(trained_tokens=n) for n in lengths if n]

    @property
    def loss_sum(self) -> float:
        """Loss of what is in the batch so far: what waits in accumulators counts with its group's coefficients, and
        not at all before they are known or where nothing of it is wanted."""
        held = ((g.coefficients, c) for g in self.groups if g.coefficients for c in g.chains if not c.abandoned)
        weighed = (a.advantage(c.attempt.reward) * c.held_loss for a, c in held if c.attempt.reward is not None)
        return self.direct_loss + math.fsum(weighed)

    def dropped(self, chain: Chain) -> bool:
        """Nothing of the chain is in the step."""
        return chain.abandoned or all(self.ledger.state(source) is State.DROPPED for source in chain.sources)

    def applied_tokens(self, chain: Chain) -> int:
        """Sampled tokens of the chain's contributions that are APPLIED."""
        if chain.abandoned:
            return 0
        applied = [self.ledger.state(source) is State.APPLIED for source in chain.sources]
        if self.grouped:
            return chain.tokens.trained_tokens() if all(applied) else 0
        return sum(chain.tokens.trained_tokens(turn, turn + 1) for turn, is_in in enumerate(applied) if is_in)

    # ------------------------------------------------------------------------------------------ events

    def apply_event(self, event: Event) -> None:
        """Apply one event."""
        identity = event.trajectory.id if isinstance(event, TrajectoryCompleted) else event.id
        attempt = self._attempts.get(TrajectoryId(*identity))
        if attempt is None:
            raise IllegalMove(
                f"{type(event).__name__} of {TrajectoryId(*identity)}, which update {self.update} did not ask for"
            )
        late = isinstance(event, (Rewarded, TurnScored)) or (isinstance(event, TrajectoryLost) and not attempt.lost)
        if attempt.ended and not late:
            raise IllegalMove(f"{type(event).__name__} of {attempt.id}, which has already ended")
        match event:
            case TurnCompleted():
                self._turn(attempt, event)
            case TurnScored():
                self._scored(attempt, event.turn, event.teacher_logprobs)
            case TrajectoryCompleted():
                self._completed(attempt, event.trajectory)
            case Rewarded():
                self._rewarded(attempt, event.reward)
            case TrajectoryLost():
                self._lost(attempt, event.reason)
        self._resolve(attempt.group)
        for chain in attempt.chains:
            self._place(chain)

    def _turn(self, attempt: TrajectoryState, event: TurnCompleted) -> None:
        self._check_versions(event.segments, count=not self.grouped)
        if self.grouped and self.release == "trajectory":
            return
        if event.turn == 0 and attempt.turns:
            self._restart(attempt)
        if event.turn != attempt.turns:
            raise IllegalMove(f"turn {event.turn} of {attempt.id} after {attempt.turns} turns")
        self._append(attempt, event.row, event.segments)

    def _append(self, attempt: TrajectoryState, row: int, segments: tuple[Segment, ...]) -> None:
        present = attempt.chains[attempt.first_chain :]
        if not present or present[-1].rollout_row != row:
            for chain in present:
                self._close_chain(chain)
            fresh = Chain(attempt=attempt, row=len(attempt.chains), rollout_row=row, abandoned=attempt.group.no_signal)
            attempt.chains.append(fresh)
        chain = attempt.chains[-1]
        turn = attempt.turns
        chain.tokens.append_turn(segments)
        if not self.grouped:
            source = attempt.source._replace(turn=attempt.turn_offset + turn)
            self.ledger.register(source)
            self.ledger.move(source, State.COMPLETE)
            chain.sources.append(source)
        elif not chain.sources:
            chain.sources.append(attempt.source)
        if turn in attempt.early_scores:
            self._scored(attempt, turn, attempt.early_scores.pop(turn))
        self._place(chain)

    def _restart(self, attempt: TrajectoryState) -> None:
        """The trajectory is run anew. What was scored (OPD) stays a sample; everything else is forgotten."""
        attempt.early_scores.clear()
        if self.grouped:
            for chain in attempt.chains:
                self._abandon(chain)
        else:
            attempt.turn_offset += attempt.turns
            self._cut_to_scored(attempt)
        attempt.first_chain = len(attempt.chains)

    def _scored(self, attempt: TrajectoryState, turn: int, logprobs: tuple[float, ...]) -> None:
        if self.grouped or attempt.lost:
            return
        found = attempt.locate(turn)
        if found is None:
            attempt.early_scores[turn] = logprobs
            return
        chain, local = found
        before = chain.tokens.scored
        chain.tokens.score_turn(local, logprobs)
        for source in chain.sources[before : chain.tokens.scored]:
            self.ledger.move(source, State.REWARDED)
        self._place(chain)

    def _completed(self, attempt: TrajectoryState, trajectory: Trajectory) -> None:
        segments = tuple(s for row in trajectory.rows for s in row.segments)
        turns = sum(s.role is Role.ACTION for s in segments)
        self._check_versions(segments, count=self.grouped or not attempt.turns)
        if attempt.turns == 0:
            self._adopt(attempt, trajectory)
        elif attempt.turns != turns:
            raise IllegalMove(f"{attempt.id} completed with {turns} turns after {attempt.turns} TurnCompleted")
        attempt.ended = attempt.complete = True
        attempt.trajectory = trajectory
        self.unended -= 1
        for chain in attempt.chains:
            self._close_chain(chain)
        if not self.grouped or attempt.group.no_signal:
            return
        self.ledger.move(attempt.source, State.COMPLETE)
        if trajectory.reward is not None:
            self._rewarded(attempt, trajectory.reward)
        else:
            self._apply_reward(attempt)

    def _adopt(self, attempt: TrajectoryState, trajectory: Trajectory) -> None:
        """Build the chains of a trajectory whose turns were not announced one by one."""
        for row, content in enumerate(trajectory.rows):
            pending: list[Segment] = []
            for segment in content.segments:
                pending.append(segment)
                if segment.role is Role.ACTION:
                    self._append(attempt, row, tuple(pending))
                    pending = []

    def _rewarded(self, attempt: TrajectoryState, reward: float) -> None:
        """A reward may come before, with or after the completed trajectory; twice only if it is the same."""
        if not self.grouped or attempt.group.no_signal or attempt.lost:
            return
        if attempt.raw_reward not in (None, reward):
            raise IllegalMove(f"{attempt.id} rewarded {reward} after {attempt.raw_reward}")
        if attempt.raw_reward is None:
            attempt.raw_reward = reward
        self._apply_reward(attempt)

    def _apply_reward(self, attempt: TrajectoryState) -> None:
        if attempt.raw_reward is None or attempt.trajectory is None or attempt.reward is not None:
            return
        if self.objective.waits_for_divergence and attempt.live_chains and attempt.divergence is None:
            return
        attempt.reward = self.objective.shape(attempt.trajectory, attempt.raw_reward, attempt.divergence or 0.0)
        if attempt.reward not in attempt.group.values:
            attempt.group.values.append(attempt.reward)
        self.ledger.move(attempt.source, State.REWARDED)
        if not attempt.live_chains:  # nothing was sampled: its gradient is 0
            self.ledger.move(attempt.source, State.DIFFERENTIATED)
            self.ledger.move(attempt.source, State.FOLDED)
        for chain in attempt.group.chains:  # the group may have a signal now, which changes its place in the queue
            self._place(chain)

    def to_compare(self) -> list[TrajectoryState]:
        """Complete trajectories whose divergence from the reference is wanted now, in order of group and index. A
        schedule that waits for the group or the batch waits for its last token here, not for its last reward."""
        if not self.objective.waits_for_divergence:
            return []
        return [a for g in self.groups if not g.no_signal for a in g.attempts if self._wants_comparison(a)]

    def _wants_comparison(self, attempt: TrajectoryState) -> bool:
        if not attempt.complete or attempt.lost or attempt.in_flight or attempt.divergence is not None:
            return False
        ended = all(other.ended for other in attempt.group.attempts)
        return bool(attempt.live_chains) and self.rule.released(group_ended=ended, batch_ended=self.unended == 0)

    def compared(self, attempt: TrajectoryState, divergence: float) -> None:
        """The learner's answer: the reward may be known now."""
        attempt.in_flight, attempt.divergence = False, divergence
        if attempt.lost or attempt.group.no_signal:
            return
        self._apply_reward(attempt)
        self._resolve(attempt.group)
        for chain in attempt.chains:
            self._place(chain)

    def _lost(self, attempt: TrajectoryState, reason: str) -> None:
        if self._on_lost == "fail":
            raise InfrastructureFailure(f"trajectory {attempt.id} is lost ({reason}) and streaming.on_lost is 'fail'")
        if attempt.raw_reward is not None:
            raise IllegalMove(f"{attempt.id} lost after it was rewarded")
        self.unended -= not attempt.ended  # it may be lost to its verifier after it completed
        attempt.ended = attempt.lost = True
        if not self.grouped:
            self._cut_to_scored(attempt)
        elif not attempt.group.no_signal:
            self.ledger.drop(attempt.source, Drop.LOST)
            for chain in attempt.chains:
                self._abandon(chain)
            if self._on_lost == "drop_group":
                self._discard(attempt.group, Drop.GROUP_DROPPED, counts=False)

    # ------------------------------------------------------------------------------------------ closure

    def _resolve(self, group: Group) -> None:
        """Close the group, and perhaps the batch, once nothing more is needed from outside."""
        if group.closed:
            return
        for attempt in group.attempts:
            if not attempt.resolved and attempt.ended and self._known(attempt):
                attempt.resolved = True
                group.resolved += 1
                self.unresolved -= 1
        if group.resolved == len(group.attempts):
            self._close_group(group)
            if self.batch_ended:
                self.place_all()

    def _known(self, attempt: TrajectoryState) -> bool:
        if not self.grouped:
            return attempt.all_scored
        return attempt.lost or attempt.group.no_signal or attempt.reward is not None

    def place_all(self) -> None:
        for group in self.groups:
            for chain in group.chains:
                self._place(chain)

    def _close_group(self, group: Group) -> None:
        group.closed = True
        if isinstance(self.objective, Grpo) and not group.no_signal:
            rewards = [a.reward for a in group.survivors if a.reward is not None]
            if not GroupStatistics.of(rewards).degenerate:
                group.coefficients = self.objective.coefficients(rewards)
            elif self.objective.config.kl_coefficient and not self.objective.waits_for_divergence:
                group.coefficients = ZERO  # no advantage, but every trajectory of the batch has a divergence
            elif self._dynamic:
                self._discard(group, Drop.REPLACED, counts=False)
                due = int(self._replacements_left > 0)
                self._replacements_left -= due
                self.replacements_due += due
            else:
                self._discard(group, Drop.EQUAL_REWARDS, counts=True)
        for chain in group.chains:
            self._place(chain)

    def _discard(self, group: Group, reason: Drop, *, counts: bool) -> None:
        """Nothing of this group enters the update."""
        group.no_signal, group.counts = True, counts
        for attempt in group.attempts:
            if self.ledger.state(attempt.source) is not State.DROPPED:
                self.ledger.drop(attempt.source, reason)
            for chain in attempt.chains:
                self._abandon(chain)

    # ------------------------------------------------------------------------------------------ chains

    def _abandon(self, chain: Chain) -> None:
        chain.abandoned = chain.closed = True
        self._place(chain)

    def _close_chain(self, chain: Chain) -> None:
        if not chain.closed:
            chain.closed = True
            self._place(chain)

    def _cut_to_scored(self, attempt: TrajectoryState) -> None:
        """The trajectory (OPD) goes no further: its leading scored turns count, later ones are dropped."""
        for chain in attempt.chains[attempt.first_chain :]:
            keep = chain.tokens.scored
            for source in chain.sources[keep:]:
                self.ledger.drop(source, Drop.LOST)
            del chain.sources[keep:]
            if keep == 0:
                self._abandon(chain)
                continue
            chain.tokens.truncate(keep)
            if chain.context > keep:  # forward passes that ran ahead of the teacher: start anew
                chain.context = 0
            self._close_chain(chain)

    def _check_versions(self, segments: tuple[Segment, ...], *, count: bool) -> None:
        for segment in segments:
            for version, tokens in Counter(segment.policy_versions).items():
                lag = self.rule.lag(version, self.policy_version)
                self.tokens_by_lag[lag] += tokens * count
