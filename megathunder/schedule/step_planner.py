"""What a chain could run now, and in which queue: the release modes as one function of its state.

    release        backward is ready when                             forward alone is ready when
    trajectory     closed and its weight's inputs are known           never
    turn           its next turn is scored (OPD)                      never
    turn_forward   closed and its weight's inputs are known           a turn is finished and not yet forwarded

"Inputs known": GRPO the reward (or nothing but the tokens under content_ready), OPD every teacher score. A chain whose
gradient is no longer wanted gets a row without new tokens that frees what the learner holds for it.
Pure functions of the state; called by `refresh`, which every change of the state ends with, and by the choice of work.
"""

from __future__ import annotations

from collections.abc import Iterable

from megathunder.objectives.base import Need
from megathunder.schedule.lifecycle import Work
from megathunder.schedule.ready_queues import ANY
from megathunder.schedule.state import Chain, Group, QueueKey, TrajectoryState
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_items import WorkStep
from megathunder.types import TrainRow


def refresh(state: UpdateState, groups: Iterable[Group]) -> None:
    """Put every chain that a change of `groups` can have made runnable into its queue, or out of all queues: the chains
    of these groups, and all chains where the batch has ended (or goes on) since."""
    if state.batch_ended is not state.all_released:
        state.all_released, groups = state.batch_ended, state.groups
    for group in groups:
        for chain in group.chains:
            step = next_step(state, chain)
            state.queues.move(chain, None if step is None else queue_of(state, chain, step))


def next_step(state: UpdateState, chain: Chain) -> WorkStep | None:
    """The step this chain could run now, or None."""
    if chain.work is not Work.IDLE:
        return None
    context, turns, release = chain.context, chain.tokens.turns, state.streaming.release
    if chain.abandoned:
        return WorkStep(context, context, context, last=True) if context else None
    if turns == 0 or not state.released(chain.trajectory):
        return None
    if release == "turn":
        return _turn_step(chain)
    if _backward_ready(state, chain):
        return WorkStep(context, turns, 0, last=True)
    if release == "turn_forward" and turns > context:
        return WorkStep(context, turns, context, last=False, forward_only=True)
    return None


def _turn_step(chain: Chain) -> WorkStep | None:
    scored, turns = chain.tokens.scored, chain.tokens.turns
    last = chain.closed and scored == turns
    if scored > chain.context:
        return WorkStep(chain.context, scored, chain.context, last=last)
    if last:  # every turn was differentiated before the chain was known to be complete
        return WorkStep(turns, turns, turns, last=True)
    return None


def _backward_ready(state: UpdateState, chain: Chain) -> bool:
    trajectory, objective = chain.trajectory, state.objective
    if Need.TEACHER in objective.needs:
        known = chain.closed and chain.tokens.scored == chain.tokens.turns
        whole_length = objective.loss.normalisation == "sequence_mean"
        return known and (trajectory.ended or not whole_length)
    return trajectory.complete and (trajectory.signal is not None or objective.starts_before_reward)


def queue_of(state: UpdateState, chain: Chain, step: WorkStep) -> QueueKey:
    """Where the chain waits for `step`."""
    trajectory, group = chain.trajectory, chain.trajectory.group
    bound = ANY if chain.cell is None else chain.cell
    if step.forward_only:
        return ("forward", group.cell if state.by_trajectory and group.cell is not None else bound)
    if chain.abandoned or not state.by_trajectory:
        return ("direct", bound)
    if trajectory.signal is None:
        return ("content_ready", group.index)
    known = group.weights is not None and not state.folds_at_closure(group)
    return ("direct", bound) if known else ("group", group.index)


def rows_to_compare(trajectory: TrajectoryState) -> tuple[TrainRow, ...]:
    """All rows of a complete trajectory, whole."""
    return tuple(
        chain.tokens.train_row(
            trajectory.source, row=chain.row, context_turns=0, end_turn=chain.tokens.turns, mask_from_turn=0, scale=1.0
        )
        for chain in trajectory.live_chains
    )


def train_row(state: UpdateState, chain: Chain, step: WorkStep, *, direct: bool) -> TrainRow:
    """The row of `step`; its scale holds the weight only where that is known and the row is added to the batch."""
    trajectory = chain.trajectory
    scale = unit = state.objective.row_scale(trajectory.trained_tokens)
    weights, signal = trajectory.group.weights, trajectory.signal
    if direct and weights is not None and signal is not None and not chain.abandoned:
        scale *= weights.weight(signal)
    first = min(step.mask_from, len(chain.sources) - 1) if not state.by_trajectory and chain.sources else 0
    return chain.tokens.train_row(
        chain.sources[first] if chain.sources else trajectory.source,
        row=chain.row,
        context_turns=step.context,
        end_turn=step.end,
        mask_from_turn=step.mask_from,
        scale=scale,
        unit=unit,
        group_size=len(trajectory.group.trajectories),
    )
