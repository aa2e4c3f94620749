"""The prompt of a group, forwarded once and backwarded once a cell and update, for every kind of accumulator.

    first row of a group     forward of the prompt's P - 1 tokens; the pass is held
    every row                its tokens from P - 1 on, with the prompt's keys and values as leaves;
                             dK, dV are added to what the row's *accumulator* owes to the prompt
    fold                     deferred[batch] += coefficient * deferred[class], as for the accumulators
    settle                   one backward of the prompt with deferred[batch] injected, into the batch accumulator

The prompt's last token is computed by every row: its hidden state predicts the row's first token. `settle` comes when
all trajectories of the group were differentiated here and none of its accumulators is open, else at the step.
`share_prompts` is the variant without state: within one micro-batch, rows of a group see one copy of their prompt.
Called by `learner.py`. Both report the prompt tokens that were not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megathunder.accumulator_keys import BATCH, AccumulatorKey
from megathunder.learner.model.attention import KeyValue, Prefix, RowSpan
from megathunder.learner.passes.backward import Pass, Runner, WorkCounters
from megathunder.learner.passes.packing import PackedRow, last_computed, whole_rows
from megathunder.learner.passes.prefix.cache import Cache, Layers, add_leading, laid_out, leaf_gradients
from megathunder.types import Differentiate, Fold, TrainRow


@dataclass(slots=True, eq=False)
class _Prompt:
    """One prompt, its held pass, and what each accumulator owes to its keys and values."""

    token_ids: tuple[int, ...]  # the P - 1 shared tokens
    cache: Cache
    held: Pass
    inject: dict[int, KeyValue]
    deferred_grad: dict[AccumulatorKey, Layers] = field(default_factory=dict)
    trajectories: set[int] = field(default_factory=set)
    group_size: int = 0


class SharedPrompts:
    """Prompts of the groups of this cell; as many trajectories as their rows say complete one, else `group_size`."""

    def __init__(self, runner: Runner, group_size: int) -> None:
        self._runner, self._group_size = runner, group_size
        self._prompts: dict[tuple[int, tuple[int, ...]], _Prompt] = {}

    @property
    def open_prompts(self) -> int:
        return len(self._prompts)

    def differentiate(self, command: Differentiate, counters: WorkCounters) -> None:
        """Forward and backward of the command's rows. Runs inside `store.collect(target)`."""
        pieces: list[PackedRow] = []
        leaves: dict[int, tuple[_Prompt, Prefix]] = {}
        for whole in whole_rows(command.rows):
            prompt = self._prompt_of(whole.row, counters)
            if prompt is None:
                pieces.append(whole)
                continue
            if id(prompt) not in leaves:
                leaves[id(prompt)] = (prompt, prompt.cache.leaves())
            shared = prompt.cache.tokens
            span = RowSpan(length=whole.end - shared, start=shared, prefix=leaves[id(prompt)][1], prefix_tokens=shared)
            pieces.append(PackedRow(row=whole.row, first=shared, end=whole.end, span=span))
            counters.save_prompt_tokens(shared)
        if not pieces:
            return
        done = self._runner.forward(pieces, counters)
        self._runner.backward(done, counters)
        self._runner.settle()
        for prompt, prefix in leaves.values():
            gradients = leaf_gradients(prefix)
            for slot, feature in enumerate(command.features or (1.0,), command.target.slot):
                add_leading(prompt.deferred_grad.setdefault(command.target._replace(slot=slot), {}), gradients, feature)
        for row in command.rows:
            for (group, _), prompt in self._prompts.items():
                if group == row.source.group:
                    prompt.trajectories.add(row.source.trajectory)
                    prompt.group_size = row.group_size or self._group_size
        if command.target == BATCH:
            self.settle(counters)

    def fold(self, fold: Fold) -> None:
        """What the accumulators do, done to what they defer."""
        for prompt in self._prompts.values():
            for term in fold.terms:
                if term.source in prompt.deferred_grad:
                    into = prompt.deferred_grad.setdefault(term.target, {})
                    add_leading(into, prompt.deferred_grad[term.source], term.coefficient)
            for key in fold.free:
                prompt.deferred_grad.pop(key, None)

    def settle(self, counters: WorkCounters, *, everything: bool = False) -> None:
        """Backward of the prompts that get no further deferred gradient, or of `everything`.

        Runs inside `store.collect(BATCH)`.
        """
        for name, prompt in list(self._prompts.items()):
            complete = everything or len(prompt.trajectories) >= prompt.group_size
            if not complete or set(prompt.deferred_grad) - {BATCH}:
                continue
            del self._prompts[name]
            if deferred_grad := prompt.deferred_grad.get(BATCH):
                parts = [(0, 0, prompt.cache.tokens, deferred_grad)]
                prompt.inject.update(laid_out(parts, prompt.held.batch.context.tokens))
                self._runner.backward(prompt.held, counters)
                self._runner.settle()

    def clear(self) -> None:
        self._prompts.clear()

    def _prompt_of(self, row: TrainRow, counters: WorkCounters) -> _Prompt | None:
        """The prompt of `row`, forwarded on first use; None where there is too little to share."""
        shared = row.prompt_tokens - 1
        if shared < 1 or last_computed(row, keep_all=False) <= shared or any(row.loss_mask[: row.prompt_tokens]):
            return None
        tokens = row.token_ids[:shared]
        name = (row.source.group, tokens)
        found = self._prompts.get(name)
        if found is None:
            piece = PackedRow(row=row, first=0, end=shared, span=RowSpan(length=shared), trained=False)
            captured: dict[int, KeyValue] = {}
            inject: dict[int, KeyValue] = {}
            held = self._runner.forward([piece], counters, captured=captured, inject=inject)
            self._runner.settle()
            cache = Cache()
            cache.extend(captured, 0, shared)
            counters.save_prompt_tokens(-shared)
            found = self._prompts[name] = _Prompt(tokens, cache, held, inject)
        return found


def share_prompts(rows: Sequence[TrainRow], counters: WorkCounters, *, weightless: bool = False) -> list[PackedRow]:
    """Pieces of one micro-batch in which rows of a group see one copy of their prompt (two rows or more)."""
    pieces: list[PackedRow] = []
    families: dict[tuple[int, tuple[int, ...]], list[PackedRow]] = {}
    for whole in whole_rows(rows, weightless=weightless):
        shared = whole.row.prompt_tokens - 1
        if shared < 1 or whole.end <= shared or any(whole.row.loss_mask[: whole.row.prompt_tokens]):
            pieces.append(whole)
        else:
            families.setdefault((whole.row.source.group, whole.row.token_ids[:shared]), []).append(whole)
    for (_, tokens), members in families.items():
        if len(members) == 1:
            pieces += members
            continue
        shared, parent = len(tokens), len(pieces)
        first = members[0].row
        pieces.append(PackedRow(row=first, first=0, end=shared, span=RowSpan(length=shared), trained=False))
        for member in members:
            span = RowSpan(length=member.end - shared, start=shared, parent=parent, parent_tokens=shared)
            pieces.append(PackedRow(row=member.row, first=shared, end=member.end, span=span))
        counters.save_prompt_tokens(shared * (len(members) - 1))
    return pieces
