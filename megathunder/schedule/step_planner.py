"""What a chain could run now, and in which lane: the release modes as one function of its state.

    release        backward is ready when                             forward alone is ready when
    trajectory     closed and its weight's inputs are known           never
    turn           its next turn is scored (OPD)                      never
    turn_forward   closed and its weight's inputs are known           a turn is finished and not yet forwarded

"Inputs known": GRPO the reward (or nothing but the tokens under content_ready), OPD every teacher score. A chain whose
gradient is no longer wanted gets a row without new tokens that frees what the learner holds for it.
Pure functions of the board; called by the dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.objectives.base import Need
from megathunder.schedule.board import Board
from megathunder.schedule.ready_queues import ANY
from megathunder.schedule.state import Attempt, Chain, Lane
from megathunder.types import TrainRow


@dataclass(frozen=True, slots=True)
class Pass:
    """Turns [context, end) are new to the learner, turns [mask_from, end) are trained."""

    context: int
    end: int
    mask_from: int
    last: bool
    forward_only: bool = False


class Planner:
    """Passes and lanes of chains under one configuration."""

    def __init__(self, config: Config, board: Board) -> None:
        self._board = board
        self._release = config.streaming.release
        self._whole_length = config.loss.normalisation == "sequence_mean"
        # Of these a weight is applied at the closure alone.
        self._apart = config.learner.accumulator == "exact" or config.salt.active

    def next_pass(self, chain: Chain) -> Pass | None:
        """The pass this chain could run now, or None."""
        if chain.done or chain.in_flight:
            return None
        context, turns = chain.context, chain.tokens.turns
        if chain.abandoned:
            return Pass(context, context, context, last=True) if context else None
        if turns == 0 or not self._board.released(chain.attempt):
            return None
        if self._release == "turn":
            return self._turn_pass(chain)
        if self._backward_ready(chain):
            return Pass(context, turns, 0, last=True)
        if self._release == "turn_forward" and turns > context:
            return Pass(context, turns, context, last=False, forward_only=True)
        return None

    def _turn_pass(self, chain: Chain) -> Pass | None:
        scored, turns = chain.tokens.scored, chain.tokens.turns
        last = chain.closed and scored == turns
        if scored > chain.context:
            return Pass(chain.context, scored, chain.context, last=last)
        if last:  # every turn was differentiated before the chain was known to be complete
            return Pass(turns, turns, turns, last=True)
        return None

    def _backward_ready(self, chain: Chain) -> bool:
        attempt, needs = chain.attempt, self._board.objective.waits_for
        if Need.TEACHER in needs:
            known = chain.closed and chain.tokens.scored == chain.tokens.turns
            return known and (attempt.ended or not self._whole_length)
        return attempt.complete and (attempt.reward is not None or Need.REWARD not in needs)

    def lane(self, chain: Chain, step: Pass) -> Lane:
        """Where the chain waits for `step`."""
        attempt, group = chain.attempt, chain.attempt.group
        bound = ANY if chain.cell is None else chain.cell
        if step.forward_only:
            return ("forward", group.cell if self._board.grouped and group.cell is not None else bound)
        if chain.abandoned or not self._board.grouped:
            return ("direct", bound)
        if group.coefficients is not None and not self._apart:
            return ("direct", bound)
        return ("own" if attempt.reward is None else "group", group.index)

    def rows_to_compare(self, attempt: Attempt) -> list[TrainRow]:
        """All rows of a complete trajectory, whole."""
        return [
            chain.tokens.train_row(
                attempt.source, row=chain.row, context_turns=0, end_turn=chain.tokens.turns, mask_from_turn=0, scale=1.0
            )
            for chain in attempt.live_chains
        ]

    def row(self, chain: Chain, step: Pass, *, direct: bool) -> TrainRow:
        """The row of `step`; its scale holds the advantage only where the weight is known and added directly."""
        attempt = chain.attempt
        scale = unit = self._board.objective.row_scale(attempt.trained_tokens)
        coefficients = attempt.group.coefficients
        if direct and coefficients is not None and attempt.reward is not None and not chain.abandoned:
            scale *= coefficients.advantage(attempt.reward)
        first = min(step.mask_from, len(chain.sources) - 1) if not self._board.grouped and chain.sources else 0
        return chain.tokens.train_row(
            chain.sources[first] if chain.sources else attempt.source,
            row=chain.row,
            context_turns=step.context,
            end_turn=step.end,
            mask_from_turn=step.mask_from,
            scale=scale,
            unit=unit,
            group_size=len(attempt.group.attempts),
        )
