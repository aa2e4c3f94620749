"""Which work a free cell does next: a pure function of the state.

Order, first that has something for this cell:
    1. folds that close a group          free accumulators
    2. direct                            weight known: never wasted, holds nothing
    3. comparisons with the reference    where rewards wait for them (KL in the reward)
    4. groups open on this cell          their accumulators exist already; groups with a signal first
    5. new groups, while the cap allows  groups with two different rewards first: they cannot turn out without a signal
    6. content-ready work                reward unknown, an accumulator each, while the cap allows
    7. forward passes of finished turns
    8. rewards that have come            to content-ready work; before 6 where the cap is reached

Work-conserving: a free cell gets nothing only if nothing runnable exists for it. A cell with one command in hand gets
another of 1, 2, 4 or 5 to do after it, so that the way to the coordinator and back costs no time, while at least as
many chains wait as there are cells: none that a cell will be free for sooner. 6 and 7 are never given ahead: a reward
that comes meanwhile makes them cheaper. A group is bound to the cell that first works for it while its weights are
unknown; a chain is bound to the cell that holds its keys and values. Deterministic: the order of events and of requests
decides everything. Called by the scheduler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind
from megathunder.config.root import Config
from megathunder.objectives.base import Need
from megathunder.schedule.group_closer import assign_rewards, close_group
from megathunder.schedule.lifecycle import Phase
from megathunder.schedule.packing import PackLimits, pack
from megathunder.schedule.ready_queues import ANY
from megathunder.schedule.state import Chain, Group, TrajectoryState
from megathunder.schedule.step_planner import next_step, rows_to_compare
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_counts import Idle
from megathunder.schedule.work_items import FoldItem, ScoreItem, StepItem, WorkItem, WorkStep

MakeFold = Callable[[UpdateState, Group, int], FoldItem | None]
CERTAIN = ("direct", "group")
"""Queues whose work no event can make cheaper."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkRules:
    """Settings of the choice. `prompt_affinity`: direct work goes first to the cell that forwarded its group's prompt;
    `look_ahead`: a busy cell gets its next command."""

    limits: PackLimits
    prompt_affinity: bool
    look_ahead: bool

    @classmethod
    def of(cls, config: Config) -> WorkRules:
        streaming, learner = config.streaming, config.learner
        # One row per item where packing would change the rounding of a contribution: each replica runs one alone.
        replicas = max(learner.accumulator_shards // learner.context_parallel, 1)
        rows = replicas if learner.accumulator == "exact" else streaming.pack_rows
        return cls(
            limits=PackLimits(tokens=streaming.pack_tokens, rows=rows),
            prompt_affinity=learner.shared_prompt != "off",
            look_ahead=streaming.look_ahead,
        )


def next_work(state: UpdateState, rules: WorkRules, cell: int) -> WorkItem | Idle:
    """The next work for a free cell, or why there is none."""
    if fold := _first_fold(state, cell, close_group):
        return fold
    if found := _direct(state, rules, cell) or _score(state, rules, cell):
        return found
    grouped = _in_groups(state, rules, cell, "group")
    if isinstance(grouped, StepItem):
        return grouped
    if not state.gates.has_trajectory_room(cell) and (fold := _first_fold(state, cell, assign_rewards)):
        return fold
    content_ready = _in_groups(state, rules, cell, "content_ready")
    if isinstance(content_ready, StepItem):
        return content_ready
    if found := _forward(state, rules, cell) or _first_fold(state, cell, assign_rewards):
        return found
    return Idle.BLOCKED if Idle.BLOCKED in (grouped, content_ready) else Idle.NO_WORK


def next_ahead(state: UpdateState, rules: WorkRules, cell: int) -> WorkItem | None:
    """The work that a cell does after what it has in hand, or None."""
    if not rules.look_ahead or state.queues.count(CERTAIN) < state.cells:
        return None
    if found := _first_fold(state, cell, close_group) or _direct(state, rules, cell):
        return found
    grouped = _in_groups(state, rules, cell, "group")
    return grouped if isinstance(grouped, StepItem) else None


def _first_fold(state: UpdateState, cell: int, make: MakeFold) -> FoldItem | None:
    return next((fold for group in state.gates.open_groups(cell) if (fold := make(state, group, cell))), None)


def _direct(state: UpdateState, rules: WorkRules, cell: int) -> StepItem | None:
    for where in (cell, ANY):
        chains = state.queues.chains(("direct", where))
        if chains and rules.prompt_affinity and where == ANY:
            # The cell that forwarded a group's prompt first; any other may still take the work.
            chains.sort(key=lambda c: c.trajectory.group.cell not in (None, cell))
        if chains:
            return _pack(state, rules, cell, BATCH, chains)
    return None


def _forward(state: UpdateState, rules: WorkRules, cell: int) -> StepItem | None:
    for where in (cell, ANY):
        if chains := state.queues.chains(("forward", where)):
            return _pack(state, rules, cell, BATCH, chains)
    return None


def _score(state: UpdateState, rules: WorkRules, cell: int) -> ScoreItem | None:
    waiting = to_compare(state)
    if not waiting:
        return None
    rows = {trajectory: rows_to_compare(trajectory) for trajectory in waiting}
    # Under exact sums alone: what else is in the micro-batch would round its reward differently.
    limits = dataclasses.replace(rules.limits, rows=1) if state.exact else rules.limits
    chosen = pack(waiting[0], waiting, limits, lambda t: sum(len(row.token_ids) for row in rows[t]))
    return ScoreItem(cell=cell, trajectories=tuple((trajectory, rows[trajectory]) for trajectory in chosen))


def to_compare(state: UpdateState) -> list[TrajectoryState]:
    """Complete trajectories whose divergence from the reference is wanted now, in order of group and index. A schedule
    that waits for the group or the batch waits for its last token here, not for its last reward."""
    if Need.DIVERGENCE not in state.objective.needs:
        return []
    found = []
    for group in state.groups:
        ended = all(trajectory.ended for trajectory in group.trajectories)
        if group.dropped is None and state.rule.released(group_ended=ended, batch_ended=state.all_ended):
            found += [t for t in group.trajectories if _wants_comparison(t)]
    return found


def _wants_comparison(trajectory: TrajectoryState) -> bool:
    return trajectory.phase is Phase.COMPLETE and trajectory.divergence is None and bool(trajectory.live_chains)


def _in_groups(state: UpdateState, rules: WorkRules, cell: int, kind: str) -> StepItem | Idle:
    """Work of a group with unknown weights, in the order of the module docstring."""
    waiting = [state.groups[g] for g in state.queues.indices(kind)]
    here = [g for g in waiting if state.gates.is_open(g) and g.cell == cell]
    new = [g for g in waiting if not state.gates.is_open(g) and g.cell in (None, cell)]
    admitted = new if state.gates.has_room(cell) else []
    for group in sorted(here, key=_by_signal(state)) + sorted(admitted, key=_by_signal(state)):
        chains = state.queues.chains((kind, group.index))
        if (chosen := _admitted(state, cell, group, chains)) is not None:
            target, first = chosen
            same = [c for c in chains if _shares(c, first, target)]
            # Moments need r_i of one row; an item carries the rewards of one.
            return _pack(state, rules, cell, target, same[:1] if target.kind is AccumulatorKind.MOMENT else same)
    return Idle.BLOCKED if here or new else Idle.NO_WORK


def _admitted(state: UpdateState, cell: int, group: Group, chains: list[Chain]) -> tuple[AccumulatorKey, Chain] | None:
    """The first chain that there is an accumulator for, and that accumulator."""
    for chain in chains:
        target = state.objective.target(group, chain.trajectory.signal, chain.trajectory.id.index)
        held = target.kind is not AccumulatorKind.PER_TRAJECTORY or target in group.keys
        if held or state.gates.has_trajectory_room(cell):
            return target, chain
    return None


def _shares(chain: Chain, first: Chain, target: AccumulatorKey) -> bool:
    """Whether `chain` is added to the accumulator of `first`."""
    if target.kind is AccumulatorKind.PER_TRAJECTORY:
        return chain.trajectory is first.trajectory
    return chain.trajectory.signal == first.trajectory.signal


def _by_signal(state: UpdateState) -> Callable[[Group], bool]:
    """Sort key: groups that hold two different rewards first, by what decides whether they are wanted."""
    raw = state.objective.replaces_equal_groups
    return lambda group: len(group.raw_values if raw else group.values) < 2


def _pack(state: UpdateState, rules: WorkRules, cell: int, target: AccumulatorKey, chains: list[Chain]) -> StepItem:
    """One micro-batch from the front of `chains`."""
    steps = {chains[0]: _step(state, chains[0])}
    alike = _alike(state, chains, steps)
    chosen = pack(chains[0], alike, rules.limits, lambda c: steps[c].new_tokens(c))
    tokens = tuple(steps[c].new_tokens(c) for c in chosen)
    return StepItem(cell=cell, target=target, steps=tuple((c, steps[c]) for c in chosen), tokens=tokens)


def _alike(state: UpdateState, chains: list[Chain], steps: dict[Chain, WorkStep]) -> Iterator[Chain]:
    """Chains whose step is of the same kind as that of the first (`Differentiate.last` speaks for all rows)."""
    first = steps[chains[0]]
    for chain in chains[1:]:
        step = _step(state, chain)
        if (step.last, step.forward_only) == (first.last, first.forward_only):
            steps[chain] = step
            yield chain


def _step(state: UpdateState, chain: Chain) -> WorkStep:
    step = next_step(state, chain)
    assert step is not None, "a chain in a queue has a step"
    return step
