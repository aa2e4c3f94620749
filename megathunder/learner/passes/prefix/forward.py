"""GradientRunner "turn_forward": forward of each turn as it arrives, its activations kept; one reverse pass at the end.

    turn s   leaves = cached keys and values; the pass is held, nothing flows back
    last     newest pass first: backward with the trajectory's weight and what later passes defer; then the pass before

No work is done twice, and what is left after the last turn is its own forward and the backward of the whole. A held
pass needs no coefficient, reward or teacher score: all three come with the last row, which carries the whole chain.
Each row is held alone: a pass with rows of several trajectories could not be reversed before the slowest of them ends,
nor into two accumulators. A last row without trained tokens frees its chain without a gradient.
Called by `learner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megathunder.errors import MegathunderError
from megathunder.learner.model.attention import KeyValue
from megathunder.learner.passes.backward import Pass, Runner, WorkCounters
from megathunder.learner.passes.packing import MicroBatch, check_row
from megathunder.learner.passes.prefix.cache import Cache, laid_out, leaf_gradients
from megathunder.learner.passes.prefix.eager import ChainName, chain_name, new_piece
from megathunder.types import Differentiate, TrainRow


@dataclass(slots=True, eq=False)
class _Held:
    """One turn: `known` leading tokens of its pass were in the cache already (a predecessor computed again)."""

    one: Pass
    inject: dict[int, KeyValue]
    known: int


@dataclass(slots=True, eq=False)
class _Chain:
    cache: Cache = field(default_factory=Cache)
    held: list[_Held] = field(default_factory=list)


class ForwardTurns:
    """Held passes of the chains of this cell. Runs inside `store.collect(target)` when `command.last`."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._chains: dict[ChainName, _Chain] = {}

    @property
    def open_chains(self) -> int:
        return len(self._chains)

    def differentiate(self, command: Differentiate, counters: WorkCounters) -> None:
        """Forward of new turns; with `command.last` the reverse pass of every chain."""
        if not command.last:
            for row in command.rows:
                check_row(row)
                self._forward(row, self._chain_of(row), counters)
            return
        ending = [(row, self._chain_of(row)) for row in command.rows]
        for row, _ in ending:
            self._chains.pop(chain_name(row), None)
        ending = [(row, chain) for row, chain in ending if any(row.loss_mask) and row.scale]
        self._last_turns(ending, counters)
        for row, chain in ending:
            for held in reversed(chain.held):
                self._reverse(row, chain.cache, held, counters)

    def clear(self) -> None:
        self._chains.clear()

    def _chain_of(self, row: TrainRow) -> _Chain:
        check_row(row)
        if row.context_tokens == 0:
            chain = self._chains[chain_name(row)] = _Chain()
            return chain
        chain = self._chains.get(chain_name(row))
        held = chain.cache.tokens if chain else 0
        if chain is None or held != row.context_tokens:
            raise MegathunderError(
                f"{row.source} (row {row.row}) continues after {row.context_tokens} tokens and this cell holds {held}: "
                "the turns of a trajectory must go to one cell, in order"
            )
        return chain

    def _forward(self, row: TrainRow, chain: _Chain, counters: WorkCounters) -> None:
        piece = new_piece(row, chain.cache, keep_all=True)
        if piece is None:
            return
        captured: dict[int, KeyValue] = {}
        inject: dict[int, KeyValue] = {}
        one = self._runner.forward([piece], counters, captured=captured, inject=inject)
        known = chain.cache.tokens - piece.first
        chain.cache.extend(captured, known, piece.length - known)
        chain.held.append(_Held(one, inject, known))
        self._runner.settle()

    def _last_turns(self, ending: list[tuple[TrainRow, _Chain]], counters: WorkCounters) -> None:
        """The newest turns of all ending chains share one micro-batch: their target and weights are known."""
        pieces, chains = [], []
        for row, chain in ending:
            piece = new_piece(row, chain.cache, keep_all=False)
            if piece is not None:
                pieces.append(piece)
                chains.append(chain)
        if not pieces:
            return
        done = self._runner.forward(pieces, counters)
        self._runner.backward(done, counters)
        self._runner.settle()
        for piece, chain in zip(pieces, chains, strict=True):
            if piece.span.prefix is not None:
                chain.cache.add_deferred(leaf_gradients(piece.span.prefix))

    def _reverse(self, row: TrainRow, cache: Cache, held: _Held, counters: WorkCounters) -> None:
        piece = held.one.batch.pieces[0]
        first = piece.first + held.known
        deferred_grad = [(held.known, first, piece.end, cache.deferred_grad)]
        held.inject.update(laid_out(deferred_grad, held.one.batch.context.tokens))
        held.one.batch = rescored(held.one.batch, row)
        self._runner.backward(held.one, counters)
        self._runner.settle()
        if piece.span.prefix is not None:
            cache.add_deferred(leaf_gradients(piece.span.prefix))


def rescored(batch: MicroBatch, row: TrainRow) -> MicroBatch:
    """A one-row micro-batch with the scale and scores of the row's final version."""
    piece = batch.pieces[0]
    at = np.asarray(piece.row.loss_mask[piece.first + 1 : piece.end], dtype=bool).nonzero()[0] + piece.first + 1

    def pick(values: tuple[float, ...]) -> torch.Tensor:
        chosen = np.asarray(values, dtype=np.float64)[at]
        return torch.from_numpy(chosen).to(device=batch.engine.device, dtype=batch.engine.dtype)

    return replace(
        batch,
        pieces=(replace(piece, row=row),),
        scales=torch.full_like(batch.scales, row.scale),
        engine=pick(row.engine_logprobs),
        teacher=pick(row.teacher_logprobs) if row.teacher_logprobs else None,
    )
