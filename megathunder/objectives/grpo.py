"""GRPO and its kin: loss = (1/Z) sum_b sum_i A_i (-s_i), where A_i is known once group b is closed.

A trajectory whose group is open is added without its advantage: to class accumulator C_v of its signal (the first
`reward_values` distinct ones), else to the moments S_0 += g, S_k += r_k g where the advantage is affine in the rewards,
else to an accumulator of its own; without a reward always to one of its own. At closure

    batch += A(v) C_v,   batch += constant S_0 + sum_k slope_k S_k,   batch += A_i g_i

Under SALT every trajectory has an accumulator of its own, and the learner reweighs the A_i at the closure (`salt.py`).
Refuses (ConfigError) advantages that groups of this size do not have, and a deviation over the batch beside a KL term
that it would divide as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from megathunder.config.objective import GrpoConfig
from megathunder.config.root import Config
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.advantage import Advantage, find_advantage
from megathunder.objectives.base import Closing, Need, Objective, Reward, Survivor, TokenTerms, weight_deviation
from megathunder.objectives.overlong import overlong_penalty
from megathunder.objectives.weights import Affine, Signal, Weights
from megathunder.registry import OBJECTIVES
from megathunder.types import Trajectory


class Grpo(Objective):
    """See the module docstring."""

    name = "grpo"

    def __init__(self, config: Config, advantage: Advantage) -> None:
        super().__init__(config.loss)
        self.settings: GrpoConfig = config.grpo
        self.advantage = advantage
        self.affine = advantage.affine
        self.moments = 1 + (len(config.grpo.reward_weights) or 2) if advantage.each_reward else 2
        self.starts_before_reward = config.streaming.content_ready
        self.keeps_each_gradient = config.salt.active
        self.replaces_equal_groups = config.grpo.dynamic_sampling
        # Under exact sums every schedule must take the same roundings, so each distinct signal keeps a class.
        exact = config.learner.accumulator == "exact"
        self.reward_values = config.group_sizes[-1] if exact else config.streaming.reward_values
        if config.grpo.kl_in_reward and config.grpo.kl_coefficient:
            self.needs = Need.TOKENS | Need.REWARD | Need.DIVERGENCE
        self.token_terms = _token_terms(config.grpo)
        self._row_limit = config.rollout.max_tokens

    def signal(self, trajectory: Trajectory, reward: Reward, divergence: float = 0.0) -> Signal:
        """The reward with its penalties: for length (of the longest row, which `rollout.max_tokens` limits) and for the
        divergence from the reference. Where each reward is compared by itself, the penalties are one more."""
        settings, penalty = self.settings, 0.0
        if settings.overlong_buffer_tokens:
            longest = max((len(row.token_ids) for row in trajectory.rows), default=0)
            penalty += overlong_penalty(longest, self._row_limit, settings.overlong_buffer_tokens)
        if Need.DIVERGENCE in self.needs:
            penalty -= settings.kl_coefficient * divergence
        if not self.advantage.each_reward:
            return (reward.value + penalty,)
        rewards = tuple(reward.parts[name] for name in sorted(reward.parts)) or (reward.value,)
        if settings.overlong_buffer_tokens or Need.DIVERGENCE in self.needs:
            rewards = (*rewards, penalty)
        if settings.reward_weights and len(settings.reward_weights) != len(rewards):
            names = sorted(reward.parts) or ["reward"]
            raise UserError(
                f"grpo.reward_weights = {list(settings.reward_weights)} and {len(rewards)} rewards of {trajectory.id}",
                expected=f"a weight for each of {', '.join(names)}, and for the penalty where there is one",
                remedy="set grpo.reward_weights in this order, or leave it empty",
            )
        return rewards

    def close_group(self, rewards: Sequence[float], signals: Sequence[Signal]) -> Closing:
        """Raw rewards decide whether a group is replaced: penalties for length make no task worth training on."""
        if self.replaces_equal_groups and len(set(rewards)) <= 1:
            return Closing(None, replace=True)
        if len({len(signal) for signal in signals}) > 1:
            raise UserError(
                f"a group whose trajectories have {sorted({len(s) for s in signals})} rewards",
                expected="the same rewards for every trajectory",
                remedy="let the reward function answer the same names each time",
            )
        weights: Weights = self.advantage.weights(signals, self.settings) if signals else Affine(0.0, ())
        if any(weights.weight(signal) for signal in set(signals)) or (signals and self.zero_weight_has_gradient):
            return Closing(weights)
        return Closing(None)

    def normaliser(self, survivors: Sequence[Survivor]) -> float:
        """Z, times the deviation of the weights over the batch where the advantage is divided by it."""
        z = super().normaliser(survivors)
        return z * (weight_deviation(survivors) + self.settings.epsilon) if self.advantage.over_batch else z


def _token_terms(grpo: GrpoConfig) -> TokenTerms:
    corrects = bool(grpo.importance_cap or grpo.clip_low or grpo.clip_high)
    return TokenTerms(
        importance_cap=grpo.importance_cap,
        clip_low=grpo.clip_low,
        clip_high=grpo.clip_high,
        kl_coefficient=0.0 if grpo.kl_in_reward else grpo.kl_coefficient,
        old_by_learner=corrects and grpo.old_logprobs == "learner",
    )


@OBJECTIVES.register("grpo")
def build(config: Config) -> Grpo:
    """The objective of a run; ConfigError as in the module docstring."""
    advantage = find_advantage(config.grpo, config.group_sizes[0])
    objective = Grpo(config, advantage)
    if advantage.over_batch and objective.zero_weight_has_gradient:
        raise ConfigError(
            f"grpo.advantage = {config.grpo.advantage!r} with grpo.kl_coefficient = {config.grpo.kl_coefficient}",
            expected="no KL term in the loss: the deviation of the batch divides everything that is in it",
            remedy="set grpo.kl_in_reward = true, or grpo.kl_coefficient = 0",
        )
    return objective
