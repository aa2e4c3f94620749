"""A learner on numbers: the gradient of token t is h(t), half of which is deferred to the replay under release "turn".

It executes Differentiate and Fold as the real cells do, and fails on what they could not do: an accumulator that does
not exist, context that this cell does not hold, a token trained twice.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind
from megathunder.types import Differentiate, Fold, TrainRow, Trajectory

SCALE = 2.0**20


def h(token: int) -> float:
    """A fixed pseudo-random gradient of a token."""
    return math.sin(token * 12.9898) * 3.0


def near(token: int) -> float:
    """The reference's log-probability of a token."""
    return -0.03 * (token % 5)


def divergence(row: TrainRow) -> float:
    """sum_t m_t (log pi_engine - log pi_ref)."""
    tokens = zip(row.token_ids, row.engine_logprobs, row.loss_mask, strict=True)
    return math.fsum(p - near(t) for t, p, m in tokens if m)


def row_gradient(row: TrainRow, tokens: Iterable[int] | None = None) -> float:
    """Gradient of scale * sum_t mask_t w_t (-log pi_t), w = log pi - log q where a teacher scored."""
    total = []
    for t in tokens if tokens is not None else range(len(row.token_ids)):
        if row.loss_mask[t]:
            weight = row.engine_logprobs[t] - row.teacher_logprobs[t] if row.teacher_logprobs else 1.0
            total.append(weight * h(row.token_ids[t]))
    return row.scale * math.fsum(total)


class FakeCell:
    """One learner cell; `exact` accumulates in fixed point, and rounds every term of a fold."""

    def __init__(self, release: str, *, exact: bool = False) -> None:
        self._release, self._exact = release, exact
        self.accumulators: dict[AccumulatorKey, float] = {BATCH: 0.0}
        self._cache: dict[tuple[tuple[int, int, int], int], int] = {}
        self._deferred: dict[tuple[tuple[int, int, int], int], float] = defaultdict(float)
        self.trained: set[int] = set()
        self.peak_groups = 0

    def execute(self, command: Differentiate | Fold) -> None:
        if isinstance(command, Fold):
            for term in command.terms:
                self.accumulators.setdefault(term.target, 0.0)
                self.accumulators[term.target] += self._fixed(term.coefficient * self.accumulators[term.source])
            for key in command.free:
                del self.accumulators[key]
            return
        for row in command.rows:
            self._differentiate(command, row)
        groups = {k.group for k in self.accumulators if k != BATCH}
        self.peak_groups = max(self.peak_groups, len(groups))

    def _differentiate(self, command: Differentiate, row: TrainRow) -> None:
        name = (tuple(row.source[:3]), row.row)
        if row.context_tokens:
            assert self._cache[name] == row.context_tokens, "context that this cell does not hold"
        gradient = 0.0
        if command.last or self._release == "turn":
            mine = [t for t in range(len(row.token_ids)) if row.loss_mask[t]]
            ids = {row.token_ids[t] for t in mine}
            assert not ids & self.trained, "a token is trained twice"
            self.trained |= ids
            gradient = row_gradient(row)
            if self._release == "turn":
                self._deferred[name] += gradient / 2
                gradient /= 2
        if command.last:
            gradient += self._deferred.pop(name, 0.0)
            self._cache.pop(name, None)
        else:
            self._cache[name] = len(row.token_ids)
        self._add(command, gradient)

    def _fixed(self, value: float) -> float:
        return round(value) if self._exact else value

    def _add(self, command: Differentiate, gradient: float) -> None:
        moments = command.target.kind is AccumulatorKind.MOMENT
        assert bool(command.features) is moments and (not moments or len(command.rows) == 1)
        for slot, feature in enumerate(command.features or (1.0,), command.target.slot):
            key = command.target._replace(slot=slot)
            added = self._fixed(gradient * SCALE) if self._exact else feature * gradient
            self.accumulators[key] = self.accumulators.get(key, 0.0) + added

    @property
    def clean(self) -> bool:
        """Nothing is left but the batch."""
        return set(self.accumulators) == {BATCH} and not self._cache and not self._deferred


def trajectory_gradient(trajectory: Trajectory) -> float:
    """g_i by definition: over all sampled tokens of all rows."""
    tokens = [t for row in trajectory.rows for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    return math.fsum(h(t) for t in tokens)
