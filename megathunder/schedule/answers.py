"""What it changes that a cell starts a piece of work, and that it has done it.

    start          the work's command; its chains are in flight, its accumulators exist, groups and chains are bound
    apply_answer   context, ledger, losses and accumulators are booked; trajectories compared have their divergence

Which chains may run after that is derived by `refresh`, once, at the end of each. Called by the scheduler.
Refuses (IllegalMove) an answer for work that is not in flight on that cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind
from megathunder.errors import IllegalMove
from megathunder.objectives.weights import accumulators, features
from megathunder.schedule.events import on_divergence
from megathunder.schedule.lifecycle import Phase, State, Work
from megathunder.schedule.state import Chain, Group
from megathunder.schedule.step_planner import refresh, train_row
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_items import FoldItem, ScoreItem, StepItem, WorkItem, WorkStep
from megathunder.types import Differentiate, Done, Fold, Score

# ---------------------------------------------------------------------------------------------- start


def start(state: UpdateState, item: WorkItem, *, prompt_affinity: bool) -> Differentiate | Fold | Score:
    """The command of `item`, which its cell gets now. `prompt_affinity` binds groups to the cell of their prompt."""
    state.last_item += 1
    number = state.last_item
    state.items[number] = item
    if item.group:
        item.group.in_flight += 1
    if isinstance(item, FoldItem):
        return Fold(item=number, update=state.update, terms=item.terms, free=item.freed)
    if isinstance(item, ScoreItem):
        for trajectory, _ in item.trajectories:
            state.move(trajectory, Phase.COMPARING)
        rows = tuple(row for _, rows in item.trajectories for row in rows)
        return Score(item=number, update=state.update, policy_version=state.policy_version, rows=rows)
    command = _differentiate(state, number, item)
    _bind(state, item, prompt_affinity=prompt_affinity)
    refresh(state, _groups(item))
    return command


def _differentiate(state: UpdateState, number: int, item: StepItem) -> Differentiate:
    signal = item.first.signal
    moments = item.target.kind is AccumulatorKind.MOMENT and signal is not None
    return Differentiate(
        item=number,
        update=state.update,
        policy_version=state.policy_version,
        target=item.target,
        rows=tuple(train_row(state, c, step, direct=item.target == BATCH) for c, step in item.steps),
        features=features(signal) if moments and signal is not None else (),
        last=item.steps[0][1].last,
        release=state.streaming.release,
    )


def _bind(state: UpdateState, item: StepItem, *, prompt_affinity: bool) -> None:
    for chain, step in item.steps:
        chain.set_work(Work.IN_FLIGHT)
        if not step.last:
            chain.cell = item.cell
        group = chain.trajectory.group
        holds = item.target != BATCH or (step.forward_only and state.by_trajectory) or prompt_affinity
        if holds and group.cell is None:
            group.cell = item.cell
    if (group := item.group) is not None:
        state.gates.open(item.cell, group)
        if item.target.kind is AccumulatorKind.PER_TRAJECTORY and item.target not in group.keys:
            state.gates.add_trajectory(item.cell)
        group.keys.update(accumulators(item.target, item.first.signal))


# ---------------------------------------------------------------------------------------------- answers


def apply_answer(state: UpdateState, done: Done) -> None:
    """Book a finished command; IllegalMove for one that is not in flight on that cell."""
    item = state.items.pop(done.item, None)
    if item is None or item.cell != done.cell:
        raise IllegalMove(f"cell {done.cell} answered item {done.item}, which it was not given")
    if item.group:
        item.group.in_flight -= 1
    if isinstance(item, FoldItem):
        _folded(state, item)
        refresh(state, (item.group,))
    elif isinstance(item, ScoreItem):
        found = iter(done.stats.divergences)
        for trajectory, rows in item.trajectories:
            on_divergence(state, trajectory, math.fsum(itertools.islice(found, len(rows))))
    else:
        _stepped(state, item, done)
        refresh(state, _groups(item))


def _stepped(state: UpdateState, item: StepItem, done: Done) -> None:
    if item.target == BATCH:
        state.direct_loss += done.stats.loss_sum
    else:  # its rows are of one group and one signal: any of them will be weighed as all are
        item.steps[0][0].held_loss += done.stats.loss_sum
    for (chain, step), spent in zip(item.steps, shares(done.stats.tokens, item.tokens), strict=True):
        chain.spent_tokens += spent
        chain.set_work(Work.DONE if step.last else Work.IDLE)
        if step.forward_only or not step.last:
            # Turns cut off meanwhile took their keys and values with them: start anew.
            chain.context = step.end if step.end <= chain.tokens.turns else 0
        if item.target != BATCH:
            chain.held = item.target
        if not step.forward_only and not chain.abandoned:
            _book(state, chain, step)


def _book(state: UpdateState, chain: Chain, step: WorkStep) -> None:
    ledger = state.ledger
    if not state.by_trajectory:
        for source in chain.sources[step.mask_from : step.end]:
            ledger.move(source, State.DIFFERENTIATED)
        if step.last:
            for source in chain.sources:
                ledger.move(source, State.FOLDED)
        return
    trajectory = chain.trajectory
    if all(c.done for c in trajectory.live_chains):
        ledger.move(trajectory.source, State.DIFFERENTIATED)
        if not any(c.held for c in trajectory.live_chains):
            ledger.move(trajectory.source, State.FOLDED)


def _folded(state: UpdateState, item: FoldItem) -> None:
    group = item.group
    state.gates.free_trajectories(item.cell, sum(k.kind is AccumulatorKind.PER_TRAJECTORY for k in item.freed))
    group.keys.difference_update(item.freed)
    for trajectory, target in item.assigned:
        group.keys.update(accumulators(target, trajectory.signal))
        for chain in trajectory.chains:
            if _has_own_accumulator(chain.held):
                chain.held = target
    if item.closing:
        _close(state, group)
    elif not group.keys and not group.in_flight:
        state.gates.close(group)


def _has_own_accumulator(held: AccumulatorKey | None) -> bool:
    return held is not None and held.kind is AccumulatorKind.PER_TRAJECTORY


def _close(state: UpdateState, group: Group) -> None:
    state.gates.close(group)
    for trajectory in group.trajectories:
        for chain in trajectory.chains:
            chain.held = None
        if state.ledger.ready_to_fold(trajectory.source):
            state.ledger.move(trajectory.source, State.FOLDED)


def _groups(item: StepItem) -> list[Group]:
    return list({chain.trajectory.group.index: chain.trajectory.group for chain, _ in item.steps}.values())


def shares(total: int, parts: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to `parts` that add up to `total`: what the learner says that an item took, over its
    rows (fewer tokens than the rows have, where last tokens and shared prompts are not computed).

    >>> shares(10, [1, 1, 1])
    [3, 3, 4]
    """
    whole, ends = sum(parts), [0]
    for end in itertools.accumulate(parts):
        ends.append(total * end // whole if whole else total)
    return [end - start for start, end in itertools.pairwise(ends)]
