"""Naive oracles: the loss of a whole batch as the definition writes it, over log-probabilities that autograd follows.

    grpo_loss = (1/Z) sum_b sum_i (A_i u_i sum_t m_t w_t (-log pi_t) + kl u_i sum_t m_t k3_t)
    opd_loss  = (1/Z) sum_i u_i sum_t m_t stopgrad(log pi_t - log q_t) log pi_t

u_i is 1, or 1 / (trained tokens of trajectory i) under sequence_mean. `logprobs_of(token_ids)` answers the
log-probabilities of tokens 1 ... T-1 of one chain, [T-1]. No accumulator, no packing, no order: everything at once.
The fast path of `learner/` must give the same gradient. Called by the tests only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megathunder.types import Row, Trajectory
from oracles.advantages import batch_deviation, group_advantages

LogprobsOf = Callable[[tuple[int, ...]], Tensor]


def grpo_loss(
    logprobs_of: LogprobsOf,
    groups: Sequence[Sequence[Trajectory]],
    *,
    advantage: str | Callable[[Sequence[Trajectory]], Sequence[float]],
    epsilon: float = 1e-6,
    over_batch: bool = False,
    normalisation: str = "token_mean",
    constant: float = 1.0,
    importance_cap: float = 0.0,
    kl_coefficient: float = 0.0,
    reference_of: LogprobsOf | None = None,
) -> Tensor:
    """Scalar loss of rewarded trajectories; `reference_of` answers the reference policy's log-probabilities. The
    `advantage` is a name, or answers the advantages of a group; `over_batch` divides them by their
    deviation over the batch."""
    total: Tensor | float = 0.0
    everything: list[float] = []
    for group in groups:
        if callable(advantage):
            weights = list(advantage(group))
        else:
            weights = group_advantages([t.reward for t in group], advantage, epsilon)
        everything += weights
        for weight, trajectory in zip(weights, group, strict=True):
            unit = _unit(trajectory, normalisation)
            for row in trajectory.rows if kl_coefficient else ():
                logprobs, _ = _trained(logprobs_of, row, row.engine_logprobs)
                d = _trained(reference_of, row, row.engine_logprobs)[0].detach() - logprobs
                total = total + kl_coefficient * unit * (d.exp() - d - 1.0).sum()
            if weight == 0.0:
                continue
            for row in trajectory.rows:
                logprobs, engine = _trained(logprobs_of, row, row.engine_logprobs)
                ratio = torch.ones_like(logprobs)
                if importance_cap > 0:
                    ratio = (logprobs.detach() - engine).exp().clamp(max=importance_cap)
                total = total + weight * unit * (ratio * -logprobs).sum()
    z = normaliser([t for g in groups for t in g], normalisation, constant)
    return total / (z * (batch_deviation(everything) + epsilon) if over_batch else z)


def opd_loss(
    logprobs_of: LogprobsOf,
    trajectories: Sequence[Trajectory],
    teacher: Sequence[Sequence[tuple[float, ...]]],
    *,
    normalisation: str = "token_mean",
    constant: float = 1.0,
) -> Tensor:
    """Scalar loss; `teacher[i][j]` are the teacher's log-probabilities [T] of row j of trajectory i."""
    total: Tensor | float = 0.0
    for trajectory, scores in zip(trajectories, teacher, strict=True):
        unit = _unit(trajectory, normalisation)
        for row, score in zip(trajectory.rows, scores, strict=True):
            logprobs, log_q = _trained(logprobs_of, row, score)
            total = total + unit * ((logprobs.detach() - log_q) * logprobs).sum()
    return total / normaliser(trajectories, normalisation, constant)


def salt_update(
    features: Tensor, weights: Tensor, *, amplification: float, explained_share: float, severe_cancellation: float
) -> Tensor:
    """[D] update of SALT from features [n, D] and weights [n], in the space of the features: the component outside the
    dominant right singular vectors is enlarged."""
    update = weights @ features
    apart = (weights[:, None] * features).square().sum()  # of terms that do not meet
    if apart == 0:
        return update
    lost = (1.0 - update.square().sum() / apart).clamp(0.0, 1.0)
    factor = 1.0 + amplification * (lost - severe_cancellation).clamp(min=0.0) / (1.0 - severe_cancellation)
    _, singular, directions = torch.linalg.svd(features, full_matrices=False)
    held = (singular**2).cumsum(0) / (singular**2).sum()
    dominant = directions[: int((held < explained_share).sum()) + 1]
    shared = dominant.T @ (dominant @ update)
    return shared + factor * (update - shared)


def normaliser(trajectories: Sequence[Trajectory], normalisation: str, constant: float) -> float:
    """Z of a batch."""
    if normalisation == "token_mean":
        return float(sum(t.sampled_tokens for t in trajectories))
    return float(len(trajectories)) if normalisation == "sequence_mean" else constant


def kl_k3(logprob: float, reference: float) -> tuple[float, float]:
    """The k3 estimate of KL(pi || ref) of one token, exp(d) - d - 1 with d = log ref - log pi, and its derivative in
    log pi."""
    d = reference - logprob
    return math.exp(d) - d - 1.0, 1.0 - math.exp(d)


def _unit(trajectory: Trajectory, normalisation: str) -> float:
    return 1.0 / trajectory.sampled_tokens if normalisation == "sequence_mean" else 1.0


def _trained(logprobs_of: LogprobsOf, row: Row, other: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens of `row`, and the entries of `other` [T] at them."""
    at = torch.tensor([t for t, m in enumerate(row.loss_mask) if m])
    logprobs = logprobs_of(row.token_ids)[at - 1]
    return logprobs, torch.tensor(other, dtype=logprobs.dtype, device=logprobs.device)[at]
