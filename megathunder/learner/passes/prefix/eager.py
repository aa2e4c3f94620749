"""GradientRunner "turn": forward and backward of each turn as it is scored; deferred gradients are replayed at the end.

    turn s   leaves = cached keys and values; backward adds dK, dV to the deferred gradients of the chain
    last     one forward of the whole context, its trained tokens already done, with all deferred gradients injected

One row replays every earlier turn at once: within it, what the injected gradients of a later turn defer to an earlier
one flows along the graph. So the replay costs one forward and backward of the context, however many turns it has.
Called by `learner.py`. Refuses context that this cell does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from megathunder.errors import MegathunderError
from megathunder.learner.model.attention import RowSpan
from megathunder.learner.passes.backward import Runner, WorkCounters
from megathunder.learner.passes.packing import PackedRow, check_row, first_computed, last_computed
from megathunder.learner.passes.prefix.cache import Cache, laid_out, leaf_gradients
from megathunder.types import Differentiate, TrainRow

ChainName = tuple[int, int, int]  # group, trajectory, row


def chain_name(row: TrainRow) -> ChainName:
    return (row.source.group, row.source.trajectory, row.row)


class EagerTurns:
    """Caches of the chains of this cell. Runs inside `store.collect(target)`."""

    def __init__(self, runner: Runner, *, replay_tokens: int) -> None:
        self._runner, self._replay_tokens = runner, replay_tokens
        self._chains: dict[ChainName, Cache] = {}

    @property
    def open_chains(self) -> int:
        return len(self._chains)

    def differentiate(self, command: Differentiate, counters: WorkCounters) -> None:
        """New tokens of every row forward and backward; chains that end are replayed and freed."""
        for row in command.rows:
            check_row(row)
            self._chains[chain_name(row)] = self._cache_of(row)
        self._new_tokens(command, counters)
        if command.last:
            ending = [(row, self._chains.pop(chain_name(row))) for row in command.rows]
            self._replay([(row, cache) for row, cache in ending if cache.deferred_grad], counters)

    def clear(self) -> None:
        self._chains.clear()

    def _cache_of(self, row: TrainRow) -> Cache:
        cache = self._chains.get(chain_name(row))
        if row.context_tokens == 0:
            return Cache()
        held = cache.tokens if cache else 0
        if held != row.context_tokens:
            raise MegathunderError(
                f"{row.source} (row {row.row}) continues after {row.context_tokens} tokens and this cell holds {held}: "
                "the turns of a trajectory must go to one cell, in order"
            )
        return cache

    def _new_tokens(self, command: Differentiate, counters: WorkCounters) -> None:
        pieces: list[PackedRow] = []
        for row in command.rows:
            piece = new_piece(row, self._chains[chain_name(row)], keep_all=not command.last)
            if piece is not None:
                pieces.append(piece)
        if not pieces:
            return
        captured = None if command.last else {}
        done = self._runner.forward(pieces, counters, captured=captured)
        self._runner.backward(done, counters)
        self._runner.settle()
        for piece, start in zip(pieces, done.batch.context.row_starts, strict=False):
            cache = self._chains[chain_name(piece.row)]
            if piece.span.prefix is not None:
                cache.add_deferred(leaf_gradients(piece.span.prefix))
            if captured is not None:
                known = cache.tokens - piece.first  # a predecessor that was computed again
                cache.extend(captured, start + known, piece.length - known)

    def _replay(self, ending: Sequence[tuple[TrainRow, Cache]], counters: WorkCounters) -> None:
        for batch in _by_tokens(ending, self._replay_tokens):
            pieces = [
                PackedRow(row=row, first=0, end=cache.tokens, span=RowSpan(length=cache.tokens), trained=False)
                for row, cache in batch
            ]
            inject: dict = {}
            done = self._runner.forward(pieces, counters, inject=inject, replay=True)
            starts = done.batch.context.row_starts
            deferred_grad = [
                (start, 0, c.tokens, c.deferred_grad) for start, (_, c) in zip(starts, batch, strict=False)
            ]
            inject.update(laid_out(deferred_grad, done.batch.context.tokens))
            self._runner.backward(done, counters)
            self._runner.settle()


def new_piece(row: TrainRow, cache: Cache, *, keep_all: bool) -> PackedRow | None:
    """The tokens of `row` that its cache does not hold, None where there are none that matter."""
    first, end = first_computed(row), last_computed(row, keep_all=keep_all)
    if end <= max(first, row.context_tokens if keep_all else 0):
        return None
    prefix = cache.leaves() if first else None
    span = RowSpan(length=end - first, start=first, prefix=prefix, prefix_tokens=first)
    return PackedRow(row=row, first=first, end=end, span=span)


def _by_tokens(ending: Sequence[tuple[TrainRow, Cache]], limit: int) -> list[list[tuple[TrainRow, Cache]]]:
    """Chains in micro-batches of at most `limit` tokens (one at least)."""
    batches: list[list[tuple[TrainRow, Cache]]] = []
    room = 0
    for row, cache in ending:
        if not batches or cache.tokens > room:
            batches.append([])
            room = limit
        batches[-1].append((row, cache))
        room -= cache.tokens
    return batches
