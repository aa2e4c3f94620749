"""From the configuration to an objective; every combination that cannot be exact is refused here, before a run starts.

Called by launch and by the scheduler. Refuses (ConfigError): groups of one, normalisations that are not affine,
release modes and content-ready release that an objective does not have, sequence_mean with turns released early, and
dropping the group of a lost trajectory whose turns are already in the sum.
"""

from __future__ import annotations

from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.objectives.advantage import check_normalisation
from megathunder.objectives.base import Need
from megathunder.objectives.grpo import Grpo
from megathunder.objectives.opd import Opd


def build_objective(config: Config) -> Grpo | Opd:
    """The objective of a run; ConfigError as in the module docstring."""
    if config.objective == "grpo":
        return _grpo(config)
    return _opd(config)


def _grpo(config: Config) -> Grpo:
    check_normalisation(config.grpo.advantage, config.group_sizes[0])
    if config.streaming.release == "turn":
        raise ConfigError(
            "streaming.release = 'turn' with objective = 'grpo'",
            expected="'trajectory' or 'turn_forward': a turn's weight needs the reward of the whole trajectory",
            remedy="use release = 'turn_forward' to run the forward passes of finished turns early",
        )
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
    streaming = config.streaming
    if streaming.content_ready:
        raise ConfigError(
            "streaming.content_ready with objective = 'opd'",
            expected="content_ready = false: distillation has no reward to wait for",
            remedy="remove content_ready, or use objective = 'grpo'",
        )
    if config.loss.normalisation == "sequence_mean" and streaming.release == "turn":
        raise ConfigError(
            "loss.normalisation = 'sequence_mean' with streaming.release = 'turn'",
            expected="a weight that is known when a turn is released; 1/length needs the whole trajectory",
            remedy="use token_mean, or release = 'turn_forward' or 'trajectory'",
        )
    if streaming.on_lost == "drop_group":
        raise ConfigError(
            "streaming.on_lost = 'drop_group' with objective = 'opd'",
            expected="'shrink' or 'fail': attempts are independent and scored turns stay in the sum",
            remedy="use on_lost = 'shrink'",
        )
    return Opd(loss=config.loss)
