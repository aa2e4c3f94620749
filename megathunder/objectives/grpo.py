"""GRPO: loss = (1/Z) sum_b sum_i A_i (-s_i), A_i = a_b r_i + c_b once group b is known.

A trajectory whose group is open is added without its coefficient: to class accumulator C_v of its reward (the first
`reward_values` distinct values), else to the moments S0 += g, S1 += r g; without a reward, to an accumulator of its
own. At closure   batch += (a v + c) C_v,   batch += a S1 + c S0,   batch += A_i own_i. Under SALT every trajectory has
one of its own, and the learner reweighs the A_i at the closure (`salt.py`). Called by the scheduler.
Refuses groups of one (std, leave_one_out) and everything that is not affine, by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.objectives import base
from megathunder.objectives.advantage import Coefficients, GroupStatistics
from megathunder.objectives.overlong import overlong_penalty
from megathunder.types import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """See the module docstring. `token_limit` is the longest trajectory (overlong shaping); `waits_for` is TOKENS alone
    under content-ready release; `own` keeps every gradient apart until the closure (SALT)."""

    config: GrpoConfig
    loss: LossConfig
    reward_values: int = 2
    own: bool = False
    token_limit: int = 0
    name: str = "grpo"
    grouped: bool = True
    waits_for: base.Need = base.Need.TOKENS | base.Need.REWARD

    @property
    def waits_for_divergence(self) -> bool:
        """The reward is not known before the learner has compared the trajectory with the reference."""
        return self.config.kl_in_reward and self.config.kl_coefficient > 0

    def shape(self, trajectory: Trajectory, reward: float, divergence: float = 0.0) -> float:
        """The verifier's reward plus the overlong penalty of this trajectory, less its divergence from the
        reference."""
        shaped = overlong_penalty(trajectory.total_tokens, self.token_limit, self.config.overlong_buffer_tokens)
        return reward + shaped - (self.config.kl_coefficient * divergence if self.waits_for_divergence else 0.0)

    def row_scale(self, trained_tokens: int) -> float:
        return base.row_scale(self.loss, trained_tokens)

    def target(self, group: base.GroupView, reward: float | None, index: int) -> AccumulatorKey:
        """Accumulator of trajectory `index` while its group's coefficients are unknown."""
        if reward is None or self.own:
            return AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, group.index, index)
        slot = group.values.index(reward)
        if slot < self.reward_values:
            return AccumulatorKey(AccumulatorKind.CLASS, group.index, slot)
        return AccumulatorKey(AccumulatorKind.MOMENT, group.index, 0)

    def coefficients(self, rewards: Iterable[float]) -> Coefficients:
        """(a, c) of a closed group from its survivors' shaped rewards."""
        return GroupStatistics.of(list(rewards)).coefficients(self.config.advantage, self.config.epsilon)

    def land(self, key: AccumulatorKey, target: AccumulatorKey, reward: float) -> base.Closure:
        """The reward of a trajectory that waits in its own accumulator `key` has come and its group is still open."""
        terms = [FoldTerm(key, target, 1.0)]
        if target.kind is AccumulatorKind.MOMENT:
            terms.append(FoldTerm(key, target._replace(slot=1), reward))
        return base.Closure(terms=tuple(terms), free=(key,))

    def close(
        self, keys: Iterable[AccumulatorKey], values: list[float], owns: dict[int, float], coefficients: Coefficients
    ) -> base.Closure:
        """Fold the accumulators `keys` of a group into the batch. `values` are its distinct rewards in slot order,
        `owns` the rewards of trajectories that sit in an accumulator of their own."""
        terms: list[FoldTerm] = []
        free = tuple(sorted(keys))
        for key in free:
            if key.kind is AccumulatorKind.CLASS:
                terms.append(FoldTerm(key, BATCH, coefficients.advantage(values[key.slot])))
            elif key.kind is AccumulatorKind.MOMENT:
                terms.append(FoldTerm(key, BATCH, coefficients.a if key.slot == 1 else coefficients.c))
            else:
                terms.append(FoldTerm(key, BATCH, coefficients.advantage(owns[key.slot])))
        return base.Closure(terms=tuple(terms), free=free)

    def normaliser(self, survivors: list[base.Survivor]) -> float:
        return base.normaliser(self.loss, survivors)
