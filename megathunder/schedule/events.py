"""What rollout events do to the state of an update.

    event                 effect
    TurnCompleted         a chain grows (turn releases, OPD); an action 0 again starts the trajectory anew
    TurnScored            its turn's weight is known
    TrajectoryCompleted   all chains are closed; COMPLETE
    Rewarded              REWARDED; the group may close
    TrajectoryLost        DROPPED (GRPO), or cut after its last scored turn (OPD); the group may close over survivors

A group closes when every trajectory is settled: then the objective says its weights, or that nothing of it is wanted.
Which chains may run after an event is not decided here: `refresh` derives it from the state, once, at the end.
Called by the scheduler. Refuses (IllegalMove) events of unknown trajectories, turns out of order, a second and
different reward, a loss after a reward; (StalePolicyError) tokens of another policy version; (InfrastructureFailure) a
loss under on_lost = "fail".
"""

from __future__ import annotations

from megathunder.errors import IllegalMove, InfrastructureFailure
from megathunder.objectives.base import Need, Reward
from megathunder.schedule.ledger import Drop
from megathunder.schedule.lifecycle import Phase, State
from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.schedule.step_planner import refresh
from megathunder.schedule.update_state import UpdateState
from megathunder.types import (
    Event,
    Rewarded,
    Role,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)


def apply_event(state: UpdateState, event: Event) -> None:
    """Apply one event."""
    name = type(event).__name__
    identity = event.trajectory.id if isinstance(event, TrajectoryCompleted) else event.id
    trajectory = state.trajectory(identity, name)
    late = isinstance(event, (Rewarded, TurnScored)) or (isinstance(event, TrajectoryLost) and not trajectory.lost)
    if trajectory.ended and not late:
        raise IllegalMove(f"{name} of {trajectory.id}, which has already ended")
    match event:
        case TurnCompleted():
            _on_turn(state, trajectory, event)
        case TurnScored():
            _on_score(state, trajectory, event.turn, event.teacher_logprobs)
        case TrajectoryCompleted():
            _on_completed(state, trajectory, event.trajectory)
        case Rewarded():
            _on_reward(state, trajectory, Reward(event.reward, event.parts))
        case TrajectoryLost():
            _on_lost(state, trajectory, event.reason)
    settle(state, trajectory.group)


def on_divergence(state: UpdateState, trajectory: TrajectoryState, divergence: float) -> None:
    """The learner has compared a trajectory with the reference: its signal may be known now."""
    if trajectory.phase is Phase.COMPARING:  # else it was lost, or its group dropped, meanwhile
        trajectory.divergence = divergence
        state.move(trajectory, Phase.COMPLETE)
        _set_signal(state, trajectory)
    settle(state, trajectory.group)


def settle(state: UpdateState, group: Group) -> None:
    """Settle the trajectories of a group whose inputs are all there, close the group once all are, refresh."""
    for trajectory in group.trajectories:
        if trajectory.complete and not trajectory.settled and _all_inputs_known(state, trajectory):
            state.move(trajectory, Phase.SETTLED)
    if not group.closed and all(trajectory.settled for trajectory in group.trajectories):
        _close_group(state, group)
    refresh(state, (group,))


def _all_inputs_known(state: UpdateState, trajectory: TrajectoryState) -> bool:
    if not state.by_trajectory:
        return trajectory.all_scored
    return trajectory.group.dropped is not None or trajectory.signal is not None


# ---------------------------------------------------------------------------------------------- turns and scores


def _on_turn(state: UpdateState, trajectory: TrajectoryState, event: TurnCompleted) -> None:
    state.count_tokens(event.segments, count=not state.by_trajectory)
    if state.by_trajectory and state.streaming.release == "trajectory":
        return
    if event.turn == 0 and trajectory.turns:
        _restart(state, trajectory)
    if event.turn != trajectory.turns:
        raise IllegalMove(f"turn {event.turn} of {trajectory.id} after {trajectory.turns} turns")
    _append(state, trajectory, event.row, event.segments)


def _append(state: UpdateState, trajectory: TrajectoryState, row: int, segments: tuple[Segment, ...]) -> None:
    present = trajectory.present_chains
    if not present or present[-1].rollout_row != row:
        for chain in present:
            chain.close()
        trajectory.chains.append(Chain(trajectory=trajectory, row=len(trajectory.chains), rollout_row=row))
        if trajectory.group.dropped is not None:
            trajectory.chains[-1].abandon()
    chain = trajectory.chains[-1]
    turn = trajectory.turns
    chain.tokens.append_turn(segments)
    if not state.by_trajectory:
        source = trajectory.source._replace(turn=trajectory.turn_offset + turn)
        state.ledger.register(source)
        state.ledger.move(source, State.COMPLETE)
        chain.sources.append(source)
    elif not chain.sources:
        chain.sources.append(trajectory.source)
    if turn in trajectory.early_scores:
        _on_score(state, trajectory, turn, trajectory.early_scores.pop(turn))


def _restart(state: UpdateState, trajectory: TrajectoryState) -> None:
    """The trajectory is run anew. What was scored (OPD) stays a sample; everything else is forgotten."""
    trajectory.early_scores.clear()
    if state.by_trajectory:
        for chain in trajectory.chains:
            chain.abandon()
    else:
        trajectory.turn_offset += trajectory.turns
        _cut_to_scored(state, trajectory)
    trajectory.first_chain = len(trajectory.chains)


def _on_score(state: UpdateState, trajectory: TrajectoryState, turn: int, logprobs: tuple[float, ...]) -> None:
    if state.by_trajectory or trajectory.lost:
        return
    found = trajectory.locate(turn)
    if found is None:
        trajectory.early_scores[turn] = logprobs
        return
    chain, local = found
    before = chain.tokens.scored
    chain.tokens.score_turn(local, logprobs)
    for source in chain.sources[before : chain.tokens.scored]:
        state.ledger.move(source, State.REWARDED)


def _cut_to_scored(state: UpdateState, trajectory: TrajectoryState) -> None:
    """The trajectory (OPD) goes no further: its leading scored turns count, later ones are dropped."""
    for chain in trajectory.present_chains:
        keep = chain.tokens.scored
        for source in chain.sources[keep:]:
            state.ledger.drop(source, Drop.LOST)
        del chain.sources[keep:]
        if keep == 0:
            chain.abandon()
            continue
        chain.tokens.truncate(keep)
        if chain.context > keep:  # forward passes that ran ahead of the teacher: start anew
            chain.context = 0
        chain.close()


# ---------------------------------------------------------------------------------------------- ends and rewards


def _on_completed(state: UpdateState, trajectory: TrajectoryState, rollout: Trajectory) -> None:
    segments = tuple(s for row in rollout.rows for s in row.segments)
    turns = sum(s.role is Role.ACTION for s in segments)
    state.count_tokens(segments, count=state.by_trajectory or not trajectory.turns)
    if trajectory.turns == 0:
        _adopt(state, trajectory, rollout)
    elif trajectory.turns != turns:
        raise IllegalMove(f"{trajectory.id} completed with {turns} turns after {trajectory.turns} TurnCompleted")
    trajectory.rollout = rollout
    state.move(trajectory, Phase.COMPLETE)
    for chain in trajectory.chains:
        chain.close()
    if not state.by_trajectory or trajectory.group.dropped is not None:
        return
    state.ledger.move(trajectory.source, State.COMPLETE)
    if rollout.reward is not None:
        _on_reward(state, trajectory, Reward(rollout.reward, rollout.reward_parts))
    else:
        _set_signal(state, trajectory)


def _adopt(state: UpdateState, trajectory: TrajectoryState, rollout: Trajectory) -> None:
    """Build the chains of a trajectory whose turns were not announced one by one."""
    for row, content in enumerate(rollout.rows):
        pending: list[Segment] = []
        for segment in content.segments:
            pending.append(segment)
            if segment.role is Role.ACTION:
                _append(state, trajectory, row, tuple(pending))
                pending = []


def _on_reward(state: UpdateState, trajectory: TrajectoryState, reward: Reward) -> None:
    """A reward may come before, with or after the completed trajectory; twice only if it is the same."""
    if not state.by_trajectory or trajectory.group.dropped is not None or trajectory.lost:
        return
    if trajectory.reward not in (None, reward):
        raise IllegalMove(f"{trajectory.id} rewarded {reward} after {trajectory.reward}")
    trajectory.reward = reward
    _set_signal(state, trajectory)


def _set_signal(state: UpdateState, trajectory: TrajectoryState) -> None:
    """What the objective compares, once all that it depends on is there."""
    reward, rollout, group = trajectory.reward, trajectory.rollout, trajectory.group
    if reward is None or rollout is None or trajectory.signal is not None:
        return
    if Need.DIVERGENCE in state.objective.needs and trajectory.live_chains and trajectory.divergence is None:
        return
    trajectory.signal = state.objective.signal(rollout, reward, trajectory.divergence or 0.0)
    if trajectory.signal not in group.values:
        group.values.append(trajectory.signal)
    if reward.value not in group.raw_values:
        group.raw_values.append(reward.value)
    state.ledger.move(trajectory.source, State.REWARDED)
    if not trajectory.live_chains:  # nothing was sampled: its gradient is 0
        state.ledger.move(trajectory.source, State.DIFFERENTIATED)
        state.ledger.move(trajectory.source, State.FOLDED)


def _on_lost(state: UpdateState, trajectory: TrajectoryState, reason: str) -> None:
    on_lost = state.streaming.on_lost
    if on_lost == "fail":
        raise InfrastructureFailure(f"trajectory {trajectory.id} is lost ({reason}) and streaming.on_lost is 'fail'")
    if trajectory.reward is not None:
        raise IllegalMove(f"{trajectory.id} lost after it was rewarded")
    state.move(trajectory, Phase.LOST)  # perhaps to its verifier, after it completed
    if not state.by_trajectory:
        _cut_to_scored(state, trajectory)
    elif trajectory.group.dropped is None:
        state.ledger.drop(trajectory.source, Drop.LOST)
        for chain in trajectory.chains:
            chain.abandon()
        if on_lost == "drop_group":
            _drop(state, trajectory.group, Drop.GROUP_DROPPED)


# ---------------------------------------------------------------------------------------------- closure


def _close_group(state: UpdateState, group: Group) -> None:
    group.closed = True
    if not state.by_trajectory or group.dropped is not None:
        return
    rewards = [t.reward.value for t in group.survivors if t.reward is not None]
    signals = [t.signal for t in group.survivors if t.signal is not None]
    closing = state.objective.close_group(rewards, signals)
    if group.fixed_weights:
        return
    group.weights = closing.weights
    if closing.replace:
        _drop(state, group, Drop.REPLACED)
        due = int(state.replacements_left > 0)
        state.replacements_left -= due
        state.replacements_due += due
    elif closing.weights is None:
        _drop(state, group, Drop.EQUAL_REWARDS)


def _drop(state: UpdateState, group: Group, reason: Drop) -> None:
    """Nothing of this group enters the update."""
    group.dropped = reason
    for trajectory in group.trajectories:
        if state.ledger.state(trajectory.source) is not State.DROPPED:
            state.ledger.drop(trajectory.source, reason)
        for chain in trajectory.chains:
            chain.abandon()
