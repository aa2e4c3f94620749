"""The loss of a micro-batch from the log-probabilities of its trained tokens.

    row loss = scale * sum_t w_t (-log pi_t)
    GRPO  w_t = 1, or the detached ratio rho_t = pi_t / pi_engine_t: min(rho_t, importance_cap); with a clip range, 0
          where scale > 0 and rho_t > 1 + clip_high, or scale < 0 and rho_t < 1 - clip_low (the gradient of PPO's
          -min(rho A, clip(rho) A))
    OPD   w_t = -(log pi_t - log q_t), detached: the row loss is scale * sum_t (log pi_t - log q_t) log pi_t

    KL    + coefficient * unit * sum_t (exp(d_t) - d_t - 1),  d_t = log ref_t - log pi_t   (k3, not times the advantage)

Log-ratios and d_t are clamped to [-20, 20], as verl does, so that no exponential is infinite.
A row in which engine and learner differ by more than `max_gap` nats on a token contributes exactly 0.
A row of scale 0 contributes exactly 0 to all but the KL term, whatever its ratios are. pi_engine is the engine's
log-probability, or that of the weights that sampled, computed by the learner. Called by `backward.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megathunder.config.root import Config
from megathunder.learner.passes.packing import MicroBatch
from megathunder.objectives.build_objective import build_objective

LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Settings of the token weights; 0 turns a cap or a clip off."""

    importance_cap: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    kl_coefficient: float = 0.0
    gap_alarm: float = 0.0
    max_gap: float = 0.0

    @property
    def clips(self) -> bool:
        return self.clip_low > 0 or self.clip_high > 0

    @classmethod
    def of(cls, config: Config) -> TokenLoss:
        terms = build_objective(config).token_terms
        return cls(
            importance_cap=terms.importance_cap,
            clip_low=terms.clip_low,
            clip_high=terms.clip_high,
            kl_coefficient=terms.kl_coefficient,
            gap_alarm=config.learner.logprob_gap_alarm,
            max_gap=config.learner.max_logprob_gap,
        )

    def row_losses(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """[R]: sum_t w_t (-log pi_t) of each row, scale not yet applied; differentiable in `logprobs` [N]."""
        weights = self.weights(batch, logprobs.detach())
        if self.max_gap > 0:
            weights = weights.masked_fill(self._too_far(batch, logprobs.detach()), 0.0)
        weighted = -logprobs * weights
        rows = torch.zeros(len(batch.pieces), dtype=logprobs.dtype, device=logprobs.device)
        return rows.index_add(0, batch.row_of, weighted)

    def row_divergences(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """[R]: sum_t k3_t of each row against `batch.reference`; differentiable in `logprobs` [N]."""
        d = (batch.reference - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        if self.max_gap > 0:
            d = d.masked_fill(self._too_far(batch, logprobs.detach()), 0.0)
        rows = torch.zeros(len(batch.pieces), dtype=logprobs.dtype, device=logprobs.device)
        return rows.index_add(0, batch.row_of, d.exp() - d - 1.0)

    def weights(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """w_t [N]."""
        if batch.teacher is not None:
            return self._quiet(batch, batch.teacher - logprobs)
        if not self.clips and self.importance_cap <= 0:
            return torch.ones_like(logprobs)
        difference = logprobs - (batch.engine if batch.old is None else batch.old)
        ratio = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        weight = ratio.clamp(max=self.importance_cap) if self.importance_cap > 0 else ratio
        if self.clips:
            scale = batch.scales[batch.row_of]
            above = (scale > 0) & (ratio > 1 + self.clip_high) if self.clip_high > 0 else torch.zeros_like(ratio).bool()
            below = (scale < 0) & (ratio < 1 - self.clip_low) if self.clip_low > 0 else torch.zeros_like(ratio).bool()
            weight = weight.masked_fill(above | below, 0.0)
        return self._quiet(batch, weight)

    def _too_far(self, batch: MicroBatch, logprobs: Tensor) -> Tensor:
        """[N]: tokens of rows whose engine log-probabilities are not believed."""
        return row_gaps(batch, logprobs)[batch.row_of] > self.max_gap

    @staticmethod
    def _quiet(batch: MicroBatch, weight: Tensor) -> Tensor:
        return weight.masked_fill(batch.scales[batch.row_of] == 0, 0.0)


def row_gaps(batch: MicroBatch, logprobs: Tensor) -> Tensor:
    """[R]: the largest |learner - engine| of each row's trained tokens."""
    rows = torch.zeros(len(batch.pieces), dtype=logprobs.dtype, device=logprobs.device)
    return rows.scatter_reduce(0, batch.row_of, (logprobs - batch.engine).abs(), "amax")
