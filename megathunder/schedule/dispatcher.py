"""Which work a free cell does next, and what its answer changes.

Order, first that has something for this cell:
    1. folds that close a group          free accumulators
    2. direct                            weight known: never wasted, holds nothing
    3. comparisons with the reference    where rewards wait for them (KL in the reward)
    4. groups open on this cell          their accumulators exist already; groups with a signal first
    5. new groups, while the cap allows  groups with two different rewards first: they cannot turn out without one
    6. content-ready work                reward unknown, an accumulator each, while the cap allows
    7. forward passes of finished turns
    8. landings                          accumulators whose reward has come; before 6 where the cap is reached

Work-conserving: a free cell gets None only if nothing runnable exists for it. A cell with one command in hand gets
another of 1, 2, 4 or 5 to do after it, so that the way to the coordinator and back costs no time, while at least as
many chains wait as there are cells: none that a cell will be free for sooner. 6 and 7 are never given ahead: a reward
that lands meanwhile makes them cheaper. A group is bound to the cell that first works for it while its coefficients are
unknown; a chain is bound to the cell that holds its keys and values. Deterministic: the order of events and of requests
decides everything. Called by the scheduler.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from megathunder.config.root import Config
from megathunder.errors import IllegalMove
from megathunder.objectives.grpo import Grpo
from megathunder.schedule.gates import Gates
from megathunder.schedule.group_closer import GroupCloser
from megathunder.schedule.lifecycle import State
from megathunder.schedule.packing import PackLimits, pack
from megathunder.schedule.ready_queues import ANY, ReadyQueues
from megathunder.schedule.state import Chain, Group
from megathunder.schedule.step_planner import StepPlanner, WorkStep
from megathunder.schedule.update_state import UpdateState
from megathunder.schedule.work_counts import Idle
from megathunder.schedule.work_items import FoldItem, Item, ScoreItem, StepItem
from megathunder.types import BATCH, AccumulatorKey, AccumulatorKind, Differentiate, Done, Fold, FoldTerm, Score

MakeFold = Callable[[Group, int], tuple[FoldItem, tuple[FoldTerm, ...]] | None]
CERTAIN = ("direct", "group")
"""Queues whose work no event can make cheaper."""


class Dispatcher:
    """Work of one update for `cells` cells. The state calls `place` for every chain that may have become runnable."""

    def __init__(self, config: Config, state: UpdateState, cells: int) -> None:
        streaming = config.streaming
        self._state = state
        self._planner = StepPlanner(config, state)
        self._queues = ReadyQueues()
        self.gates = Gates(
            cells=cells, max_open_groups=streaming.max_open_groups, max_own=streaming.max_per_trajectory_accumulators
        )
        exact = self._exact = config.learner.accumulator == "exact"
        # One row an item where packing would change the rounding of a contribution.
        replicas = max(config.learner.accumulator_shards // config.learner.context_parallel, 1)  # each runs one alone
        self._limits = PackLimits(tokens=streaming.pack_tokens, rows=replicas if exact else streaming.pack_rows)
        self._closer = GroupCloser(state.objective, once=exact) if isinstance(state.objective, Grpo) else None
        # Every trajectory has an accumulator: admission counts groups, so that one that is open can always close.
        self._groups_own = config.objective == "grpo" and config.salt.active
        self._prompt_affinity = config.learner.shared_prompt != "off"
        self._cells = cells if streaming.look_ahead else 0
        self._items: dict[int, Item] = {}
        self._next_item = state.update << 20
        self.refusal = Idle.NO_WORK

    @property
    def idle(self) -> bool:
        """Nothing ready, nothing in flight, no accumulator held."""
        return not self._queues and not self._items and self.gates.none_open

    def place(self, chain: Chain) -> None:
        """Put a chain into the queue it belongs to now, or into none."""
        step = self._planner.next_step(chain)
        self._queues.move(chain, None if step is None else self._planner.queue(chain, step))

    # ------------------------------------------------------------------------------------------ choice

    def next_work(self, cell: int) -> Differentiate | Fold | Score | None:
        """The next command for a free cell, or None (`refusal` says why)."""
        self.refusal = Idle.NO_WORK
        if fold := self._fold(cell):
            return fold
        chosen = self._direct(cell)
        if chosen is None and (score := self._score(cell)):
            return score
        chosen = chosen or self._grouped(cell, "group")
        if not chosen and not self.gates.has_own_room(cell) and (fold := self._land(cell)):
            return fold
        chosen = chosen or self._grouped(cell, "own") or self._forward(cell)
        if not chosen:
            return self._land(cell)
        self.refusal = Idle.NO_WORK
        return self._differentiate(cell, *chosen)

    def next_ahead(self, cell: int) -> Differentiate | Fold | None:
        """The command that a cell does after the one in hand, or None."""
        if not self._cells or self._queues.count(CERTAIN) < self._cells:
            return None
        if fold := self._fold(cell):
            return fold
        chosen = self._direct(cell) or self._grouped(cell, "group")
        return self._differentiate(cell, *chosen) if chosen else None

    def _fold(self, cell: int) -> Fold | None:
        return self._first_fold(cell, self._closer.close_group) if self._closer else None

    def _land(self, cell: int) -> Fold | None:
        return self._first_fold(cell, self._closer.assign_rewards) if self._closer else None

    def _first_fold(self, cell: int, make: MakeFold) -> Fold | None:
        for group in self.gates.open_groups(cell):
            if made := make(group, cell):
                item, terms = made
                return Fold(item=self._register(item), update=self._state.update, terms=terms, free=item.freed)
        return None

    def _score(self, cell: int) -> Score | None:
        waiting = self._state.to_compare()
        if not waiting:
            return None
        rows = {attempt: self._planner.rows_to_compare(attempt) for attempt in waiting}
        # Under exact sums alone: what else is in the micro-batch would round its reward differently.
        limits = dataclasses.replace(self._limits, rows=1) if self._exact else self._limits
        chosen = pack(waiting[0], waiting, limits, lambda a: sum(len(row.token_ids) for row in rows[a]))
        for attempt in chosen:
            attempt.in_flight = True
        number = self._register(ScoreItem(cell=cell, attempts=tuple((a, len(rows[a])) for a in chosen)))
        return Score(
            item=number,
            update=self._state.update,
            policy_version=self._state.policy_version,
            rows=tuple(row for attempt in chosen for row in rows[attempt]),
        )

    def _direct(self, cell: int) -> tuple[AccumulatorKey, list[Chain]] | None:
        for queue in (("direct", cell), ("direct", ANY)):
            chains = self._queues.chains(queue)
            if chains and self._prompt_affinity and queue[1] == ANY:
                # The cell that forwarded a group's prompt first; any other may still take the work.
                chains.sort(key=lambda c: c.attempt.group.cell not in (None, cell))
            if chains:
                return BATCH, chains
        return None

    def _forward(self, cell: int) -> tuple[AccumulatorKey, list[Chain]] | None:
        for queue in (("forward", cell), ("forward", ANY)):
            chains = self._queues.chains(queue)
            if chains:
                return BATCH, chains
        return None

    def _grouped(self, cell: int, kind: str) -> tuple[AccumulatorKey, list[Chain]] | None:
        """Work of a group with unknown coefficients, in the order of the module docstring."""
        waiting = [self._state.groups[g] for g in self._queues.indices(kind)]
        if kind == "own" and waiting and not self._groups_own and not self.gates.has_own_room(cell):
            self.refusal = Idle.BLOCKED
            return None
        here = [g for g in waiting if self.gates.is_open(g) and g.cell == cell]
        new = [g for g in waiting if not self.gates.is_open(g) and g.cell in (None, cell)]
        if new and not here and not self.gates.has_room(cell):
            self.refusal, new = Idle.BLOCKED, []
        for group in sorted(here, key=_worth) or sorted(new, key=_worth):
            chains = self._queues.chains((kind, group.index))
            first = chains[0].attempt
            target = self._state.objective.target(group, first.reward, first.id.index)
            alone = target.kind is AccumulatorKind.PER_TRAJECTORY
            same = [c for c in chains if c.attempt.reward == first.reward and (not alone or c.attempt is first)]
            # Moments need r_i of one row; an item carries one reward.
            return target, same[:1] if target.kind is AccumulatorKind.MOMENT else same
        return None

    # ------------------------------------------------------------------------------------------ commands

    def _differentiate(self, cell: int, target: AccumulatorKey, chains: list[Chain]) -> Differentiate:
        steps = {chains[0]: self._require(chains[0])}
        chosen = pack(chains[0], self._alike(chains, steps), self._limits, lambda c: _new_tokens(c, steps[c]))
        steps = tuple((c, steps[c]) for c in chosen)
        first_step = steps[0][1]
        rows = tuple(self._planner.row(c, s, direct=target == BATCH) for c, s in steps)
        tokens = tuple(_new_tokens(c, s) for c, s in steps)
        number = self._register(StepItem(cell=cell, target=target, steps=steps, tokens=tokens))
        self._bind(cell, target, steps)
        reward = steps[0][0].attempt.reward if target.kind is AccumulatorKind.MOMENT else None
        return Differentiate(
            item=number,
            update=self._state.update,
            policy_version=self._state.policy_version,
            target=target,
            rows=rows,
            reward=reward or 0.0,
            last=first_step.last,
            release=self._state.release,
        )

    def _alike(self, chains: list[Chain], steps: dict[Chain, WorkStep]) -> Iterator[Chain]:
        """Chains whose pass is of the same kind as that of the first (`Differentiate.last` speaks for all rows)."""
        first = steps[chains[0]]
        for chain in chains[1:]:
            step = self._require(chain)
            if (step.last, step.forward_only) == (first.last, first.forward_only):
                steps[chain] = step
                yield chain

    def _require(self, chain: Chain) -> WorkStep:
        step = self._planner.next_step(chain)
        assert step is not None, "a chain in a queue has a pass"
        return step

    def _bind(self, cell: int, target: AccumulatorKey, steps: tuple[tuple[Chain, WorkStep], ...]) -> None:
        for chain, step in steps:
            self._queues.move(chain, None)
            chain.in_flight = True
            group = chain.attempt.group
            if not step.last:
                chain.cell = cell
            holds = target != BATCH or (step.forward_only and self._state.grouped) or self._prompt_affinity
            if holds and group.cell is None:
                group.cell = cell
                for other in group.chains:
                    self.place(other)
        if target != BATCH:
            self.gates.open(cell, steps[0][0].attempt.group)
        if (
            target.kind is AccumulatorKind.PER_TRAJECTORY
            and not self._groups_own
            and target not in steps[0][0].attempt.group.keys
        ):
            self.gates.take_own(cell)

    def _register(self, item: Item) -> int:
        self._next_item += 1
        self._items[self._next_item] = item
        if item.group:
            item.group.in_flight += 1
        return self._next_item

    # ------------------------------------------------------------------------------------------ answers

    def on_done(self, done: Done) -> None:
        """Book a finished command; IllegalMove for one that is not in flight on that cell."""
        item = self._items.pop(done.item, None)
        if item is None or item.cell != done.cell:
            raise IllegalMove(f"cell {done.cell} answered item {done.item}, which it was not given")
        if item.group:
            item.group.in_flight -= 1
        if isinstance(item, FoldItem):
            self._folded(item)
            return
        if isinstance(item, ScoreItem):
            found = iter(done.stats.divergences)
            for attempt, count in item.attempts:
                self._state.compared(attempt, math.fsum(itertools.islice(found, count)))
            return
        if item.target == BATCH:
            self._state.direct_loss += done.stats.loss_sum
        else:  # its rows are of one group and one reward: any of them will be weighed as all are
            item.steps[0][0].held_loss += done.stats.loss_sum
        for (chain, step), tokens in zip(item.steps, shares(done.stats.tokens, item.tokens), strict=True):
            chain.spent_tokens += tokens
            self._passed(chain, step, item.target)

    def _passed(self, chain: Chain, step: WorkStep, target: AccumulatorKey) -> None:
        chain.in_flight = False
        if step.forward_only or not step.last:
            # Turns cut off meanwhile took their keys and values with them: start anew.
            chain.context = step.end if step.end <= chain.tokens.turns else 0
        chain.done = step.last
        if target != BATCH:
            group = chain.attempt.group
            group.keys.add(target)
            if target.kind is AccumulatorKind.MOMENT:
                group.keys.add(target._replace(slot=1))
            chain.held = target
        if not step.forward_only and not chain.abandoned:
            self._book(chain, step)
        self.place(chain)

    def _book(self, chain: Chain, step: WorkStep) -> None:
        ledger = self._state.ledger
        if not self._state.grouped:
            for source in chain.sources[step.mask_from : step.end]:
                ledger.move(source, State.DIFFERENTIATED)
            if step.last:
                for source in chain.sources:
                    ledger.move(source, State.FOLDED)
            return
        attempt = chain.attempt
        if all(c.done for c in attempt.live_chains):
            ledger.move(attempt.source, State.DIFFERENTIATED)
            if not any(c.held for c in attempt.live_chains):
                ledger.move(attempt.source, State.FOLDED)

    def _folded(self, item: FoldItem) -> None:
        group = item.group
        if not self._groups_own:
            self.gates.free_own(item.cell, sum(k.kind is AccumulatorKind.PER_TRAJECTORY for k in item.freed))
        group.keys.difference_update(item.freed)
        for attempt, target in item.landed:
            group.keys.add(target)
            if target.kind is AccumulatorKind.MOMENT:
                group.keys.add(target._replace(slot=1))
            for chain in attempt.chains:
                if chain.held is not None and chain.held.kind is AccumulatorKind.PER_TRAJECTORY:
                    chain.held = target
        if item.closing:
            self._close(group)
        elif not group.keys and not group.in_flight:
            self.gates.close(group)

    def _close(self, group: Group) -> None:
        self.gates.close(group)
        for attempt in group.attempts:
            for chain in attempt.chains:
                chain.held = None
            source, ledger = attempt.source, self._state.ledger
            if ledger.ready_to_fold(source):
                ledger.move(source, State.FOLDED)


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


def _worth(group: Group) -> bool:
    """Sort key: groups that hold two different rewards first."""
    return not group.has_signal


def _new_tokens(chain: Chain, step: WorkStep) -> int:
    ends = chain.tokens.ends
    start = ends[step.context - 1] if step.context else 0
    return (ends[step.end - 1] if step.end else 0) - start
