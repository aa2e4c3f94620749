"""On-policy distillation: loss = (1/Z) sum_i sum_t m_t stopgrad(log pi_k(y_t) - log q(y_t)) log pi(y_t).

The sampled reverse-KL semi-gradient. The coefficient of a token is known when the frozen teacher q has scored its
turn, so every contribution is direct; attempts at one prompt are independent (no group, no statistics). The learner
forms the coefficient from `TrainRow.teacher_logprobs` and its own log-probabilities. A turn that is scored counts
even if a later turn of its trajectory is lost: it is a sample of the policy like any other. Called by the scheduler.
Refuses sequence_mean when turns are released before the length of their trajectory is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.objective import LossConfig
from megathunder.objectives import base
from megathunder.types import BATCH, AccumulatorKey, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Opd:
    """See the module docstring."""

    loss: LossConfig
    name: str = "opd"
    grouped: bool = False
    waits_for: base.Need = base.Need.TOKENS | base.Need.TEACHER

    waits_for_divergence: bool = False

    def shape(self, trajectory: Trajectory, reward: float, divergence: float = 0.0) -> float:
        return reward

    def row_scale(self, trained_tokens: int) -> float:
        return base.row_scale(self.loss, trained_tokens)

    def target(self, group: base.GroupView, reward: float | None, index: int) -> AccumulatorKey:
        return BATCH

    def normaliser(self, survivors: list[base.Survivor]) -> float:
        return base.normaliser(self.loss, survivors)
