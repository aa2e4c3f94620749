"""What a chain could run now, and in which queue: the release modes as one function of its state.

    release        backward is ready when                             forward alone is ready when
    trajectory     closed and its weight's inputs are known           never
    turn           its next turn is scored (OPD)                      never
    turn_forward   closed and its weight's inputs are known           a turn is finished and not yet forwarded

"Inputs known": GRPO the reward (or nothing but the tokens under content_ready), OPD every teacher score. A chain whose
gradient is no longer wanted gets a row without new tokens that frees what the learner holds for it.
Pure functions of the state; called by the dispatcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.objectives.base import Need
from megathunder.schedule.ready_queues import ANY
from megathunder.schedule.state import Chain, QueueKey, TrajectoryState
from megathunder.schedule.update_state import UpdateState
from megathunder.types import TrainRow


@dataclass(frozen=True, slots=True)
class WorkStep:
    """Turns [context, end) are new to the learner, turns [mask_from, end) are trained."""

    context: int
    end: int
    mask_from: int
    last: bool
    forward_only: bool = False


class StepPlanner:
    """Steps and queues of chains under one configuration."""

    def __init__(self, config: Config, state: UpdateState) -> None:
        self._state = state
        self._release = config.streaming.release
        self._whole_length = config.loss.normalisation == "sequence_mean"
        # Of these a weight is applied at the closure alone.
        self._fold_at_closure = config.learner.accumulator == "exact" or config.salt.active

    def next_step(self, chain: Chain) -> WorkStep | None:
        """The pass this chain could run now, or None."""
        if chain.done or chain.in_flight:
            return None
        context, turns = chain.context, chain.tokens.turns
        if chain.abandoned:
            return WorkStep(context, context, context, last=True) if context else None
        if turns == 0 or not self._state.released(chain.attempt):
            return None
        if self._release == "turn":
            return self._turn_step(chain)
        if self._backward_ready(chain):
            return WorkStep(context, turns, 0, last=True)
        if self._release == "turn_forward" and turns > context:
            return WorkStep(context, turns, context, last=False, forward_only=True)
        return None

    def _turn_step(self, chain: Chain) -> WorkStep | None:
        scored, turns = chain.tokens.scored, chain.tokens.turns
        last = chain.closed and scored == turns
        if scored > chain.context:
            return WorkStep(chain.context, scored, chain.context, last=last)
        if last:  # every turn was differentiated before the chain was known to be complete
            return WorkStep(turns, turns, turns, last=True)
        return None

    def _backward_ready(self, chain: Chain) -> bool:
        attempt, needs = chain.attempt, self._state.objective.waits_for
        if Need.TEACHER in needs:
            known = chain.closed and chain.tokens.scored == chain.tokens.turns
            return known and (attempt.ended or not self._whole_length)
        return attempt.complete and (attempt.reward is not None or Need.REWARD not in needs)

    def queue(self, chain: Chain, step: WorkStep) -> QueueKey:
        """Where the chain waits for `step`."""
        attempt, group = chain.attempt, chain.attempt.group
        bound = ANY if chain.cell is None else chain.cell
        if step.forward_only:
            return ("forward", group.cell if self._state.grouped and group.cell is not None else bound)
        if chain.abandoned or not self._state.grouped:
            return ("direct", bound)
        if group.coefficients is not None and not self._fold_at_closure:
            return ("direct", bound)
        return ("own" if attempt.reward is None else "group", group.index)

    def rows_to_compare(self, attempt: TrajectoryState) -> list[TrainRow]:
        """All rows of a complete trajectory, whole."""
        return [
            chain.tokens.train_row(
                attempt.source, row=chain.row, context_turns=0, end_turn=chain.tokens.turns, mask_from_turn=0, scale=1.0
            )
            for chain in attempt.live_chains
        ]

    def row(self, chain: Chain, step: WorkStep, *, direct: bool) -> TrainRow:
        """The row of `step`; its scale holds the advantage only where the weight is known and added directly."""
        attempt = chain.attempt
        scale = unit = self._state.objective.row_scale(attempt.trained_tokens)
        coefficients = attempt.group.coefficients
        if direct and coefficients is not None and attempt.reward is not None and not chain.abandoned:
            scale *= coefficients.advantage(attempt.reward)
        first = min(step.mask_from, len(chain.sources) - 1) if not self._state.grouped and chain.sources else 0
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
