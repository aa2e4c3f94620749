"""From the configuration to an objective.

Called by launch and by the scheduler. Raises ConfigError for a combination that cannot be exact
(`config/compatibility.py`), for groups of one, and for normalisations that are not affine.
"""

from __future__ import annotations

from megathunder.config.compatibility import check_objective
from megathunder.config.root import Config
from megathunder.objectives.advantage import check_normalisation
from megathunder.objectives.base import Need
from megathunder.objectives.grpo import Grpo
from megathunder.objectives.opd import Opd


def build_objective(config: Config) -> Grpo | Opd:
    """The objective of a run; ConfigError as in the module docstring."""
    check_objective(config)
    if config.objective == "grpo":
        return _grpo(config)
    return _opd(config)


def _grpo(config: Config) -> Grpo:
    check_normalisation(config.grpo.advantage, config.group_sizes[0])
    exact = config.learner.accumulator == "exact"
    return Grpo(
        config=config.grpo,
        loss=config.loss,
        # Under exact sums every schedule must take the same roundings, so each distinct reward keeps a class.
        reward_values=config.group_sizes[-1] if exact else config.streaming.reward_values,
        own=config.salt.active,
        token_limit=config.rollout.max_tokens,
        waits_for=Need.TOKENS if config.streaming.content_ready else Need.TOKENS | Need.REWARD,
    )


def _opd(config: Config) -> Opd:
    return Opd(loss=config.loss)
