"""On-policy distillation: loss = (1/Z) sum_i sum_t m_t stopgrad(log pi_k(y_t) - log q(y_t)) log pi(y_t).

The sampled reverse-KL semi-gradient. The coefficient of a token is known when the frozen teacher q has scored its
turn, so every contribution is direct; trajectories of one prompt are independent (no group, no statistics). The learner
forms the coefficient from `TrainRow.teacher_logprobs` and its own log-probabilities. A turn that is scored counts
even if a later turn of its trajectory is lost: it is a sample of the policy like any other. Called by the scheduler.
"""

from __future__ import annotations

from megathunder.config.root import Config
from megathunder.objectives.base import Need, Objective, Unit
from megathunder.registry import OBJECTIVES


class Opd(Objective):
    """See the module docstring."""

    name = "opd"
    unit = Unit.TURN
    needs = Need.TOKENS | Need.TEACHER


@OBJECTIVES.register("opd")
def build(config: Config) -> Opd:
    """The objective of a run."""
    return Opd(config.loss)
