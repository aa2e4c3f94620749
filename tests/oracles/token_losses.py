"""Scalar terms of the token losses in float64: what the tensor code of the learner must equal, token by token.

    k3 estimator     exp(d) - d - 1 with d = log ref - log p;     derivative to log p: 1 - exp(d)
    clipped loss     -min(ratio A, clip(ratio, 1 - low, 1 + high) A)
    distillation     reverse KL of a sampled token: log p - log q; its advantage is the negative of that

Sign: losses to minimise.
"""

from __future__ import annotations

import math


def k3(logprob: float, reference_logprob: float) -> tuple[float, float]:
    """The k3 estimate of KL(p || ref) on one sampled token and its derivative to log p."""
    difference = reference_logprob - logprob
    return math.expm1(difference) - difference, -math.expm1(difference)


def clipped_loss(ratio: float, advantage: float, low: float, high: float) -> float:
    """The clipped surrogate of one token; exactly 0 where the advantage is 0, whatever the ratio."""
    if advantage == 0.0:
        return 0.0
    clipped = min(max(ratio, 1.0 - low), 1.0 + high)
    return -min(ratio * advantage, clipped * advantage)


def sampled_reverse_kl(logprob: float, teacher_logprob: float) -> float:
    """log p - log q of one sampled token: the coefficient of its log-probability in the distillation loss."""
    return logprob - teacher_logprob
