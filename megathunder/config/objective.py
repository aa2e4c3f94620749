"""What is minimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import (
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoConfig:
    """[grpo] group relative policy optimisation."""

    advantage: Reference = "std"
    """Advantage from the rewards of a group: std (population), sample_std, none (mean only, Dr. GRPO), leave_one_out
    (RLOO), reinforce_plus_plus_baseline, maxrl, pass_at_k, gdpo, or your own "file.py:f" with f(rewards) -> advantages
    that gives equal rewards equal advantages."""
    epsilon: NonNegativeFloat = 1e-6
    """Added to the standard deviation (maxrl: to the mean), outside the root."""
    pass_k: PositiveInt = 2
    """k of advantage = pass_at_k; smaller than a group."""
    reward_weights: tuple[NonNegativeFloat, ...] = ()
    """advantage = gdpo: weights of a trajectory's rewards in the order of their names, a length or KL penalty last;
    empty: all 1."""
    importance_cap: NonNegativeFloat = 0.0
    """Truncate pi_learner/pi_engine at this value and use it as token weight; 0: weight 1."""
    clip_low: NonNegativeFloat = 0.0
    """Clip range below 1; has an effect only where ratios differ from 1 (one_step_off). 0: none."""
    clip_high: NonNegativeFloat = 0.0
    """Clip range above 1."""
    old_logprobs: Literal["engine", "learner"] = "engine"
    """one_step_off: whose log-probabilities the ratio divides by: the engine's, as sampled, or the learner's own with
    the weights that sampled (one more copy of the weights, one more forward pass)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL term to the policy as it was loaded; 0: no reference is held. Costs a copy of the weights and a
    forward pass; a trajectory whose group is still open is differentiated a second time for it."""
    kl_in_reward: bool = False
    """Subtract kl_coefficient x sum_t (log pi - log ref) of a trajectory from its reward instead of adding a loss term.
    Costs a forward pass of each trajectory under the reference before its reward is known, and rewards that all differ
    (moments, one row a micro-batch)."""
    dynamic_sampling: bool = False
    """Replace a group that closes with equal rewards by a new prompt (DAPO)."""
    max_replacements: NonNegativeInt = 0
    """Replacement groups an update may draw."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Linear length penalty over the last tokens before `rollout.max_tokens` (DAPO); 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpdConfig:
    """[opd] on-policy distillation: sampled reverse KL to a frozen teacher."""

    teacher: InputPath = ""
    """Hugging Face folder of the teacher (served by a scoring server)."""
    teacher_urls: tuple[str, ...] = ()
    """Teacher servers that already run; empty: this run starts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """[loss] what the sums are divided by."""

    normalisation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Z: trained tokens of the batch, trajectories (each its own token mean), or `constant`."""
    constant: PositiveFloat = 1.0
    """Z when `normalisation` is `constant`."""
