"""What a learner command costs in seconds: the work price of its rows, by kind of pass.

    price of tokens [P, T)     token_s (T - P) + attention_s (T^2 - P^2)          forward and backward
    forward alone              a third of it; a reverse pass over kept activations two thirds
    replay of deferred turns   `replay` times the whole price, for every turn but the last (0: the release model)
    item, fold                 a constant each

Fitted to the recorded spans of a run by least squares, or stated. Called by replay.py.
Refuses a fit without spans.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megathunder.errors import UserError
from megathunder.types import Differentiate, Fold, Score, TrainRow

FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of learner work on one cell."""

    token_s: float
    attention_s: float = 0.0
    item_s: float = 0.0
    fold_s: float = 0.0
    replay: float = 1.0

    def seconds(self, command: Differentiate | Fold | Score, release: str) -> float:
        """Duration of `command` under a release mode."""
        if isinstance(command, Score):
            return self.item_s + FORWARD_SHARE * sum(self.price(0, len(row.token_ids)) for row in command.rows)
        if isinstance(command, Fold):
            return self.fold_s
        return self.item_s + sum(self._row(row, release, command.last) for row in command.rows)

    def _row(self, row: TrainRow, release: str, last: bool) -> float:
        new = self.price(row.context_tokens, len(row.token_ids))
        kept = self.price(0, row.context_tokens)
        if release == "turn":
            return new + (self.replay * kept if last else 0.0)
        if release == "turn_forward":
            if not last:
                return FORWARD_SHARE * new
            wanted = any(row.loss_mask)
            return new + (1.0 - FORWARD_SHARE) * kept if wanted else 0.0
        return new

    def price(self, start: int, end: int) -> float:
        """Forward and backward of tokens [start, end)."""
        return self.token_s * (end - start) + self.attention_s * (end * end - start * start)


def fit_costs(items: Sequence[tuple[int, float]], fold_s: float = 0.0) -> CostModel:
    """Trimmed least squares of seconds = item_s + token_s * tokens over recorded (tokens, seconds): what lies further
    than three times the median residual from the line (first calls, a busy machine) is left out, twice."""
    if not items:
        raise UserError(
            "no recorded learner work",
            expected="spans of differentiate in events.jsonl",
            remedy="predict from a run that has completed at least one update",
        )
    kept = list(items)
    for _ in range(3):
        item_s, token_s = _line(kept)
        residuals = {i: abs(s - item_s - token_s * t) for i, (t, s) in enumerate(kept)}
        limit = 3.0 * statistics.median(residuals.values())
        kept = [kept[i] for i, r in residuals.items() if r <= limit + 1e-12]
    return CostModel(token_s=token_s, item_s=item_s, fold_s=fold_s)


def _line(items: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(intercept, slope), neither negative."""
    mean_x = statistics.fmean(t for t, _ in items)
    mean_y = statistics.fmean(s for _, s in items)
    variance = sum((t - mean_x) ** 2 for t, _ in items)
    covariance = sum((t - mean_x) * (s - mean_y) for t, s in items)
    steepest = mean_y / mean_x if mean_x else 0.0
    slope = min(covariance / variance, steepest) if variance and covariance > 0 else steepest
    return max(mean_y - slope * mean_x, 0.0), slope
