"""What an objective is: the one object that scheduler, learner and plan ask, and never look inside.

    question                                               method or attribute
    what is a contribution, what does it wait for?         unit, needs
    what is compared?                                      signal: the rewards of a trajectory, shaped
    is the weight of a trajectory known with its reward?   opening_weights (None: with the closure of its group)
    where does it wait until then?                         target: an accumulator by class, moment or trajectory
    what is the weight at the closure of a group?          close_group
    what is the sum divided by?                            normaliser
    what goes on from update to update?                    end_update, state, restore

A weight is sum_k phi_k c_k: features phi are known at completion, coefficients c at the closure (`weights.py`).
Losses are minimised; a row's loss is scale * sum_t mask_t w_t (-log pi_t) with scale = row_scale * weight.

An objective of one's own is a file with a subclass and a function `build(config) -> Objective`, named
`objective = "file.py:build"`. The defaults here are those of a policy gradient with groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Protocol

from megathunder.accumulator_keys import AccumulatorKey, AccumulatorKind
from megathunder.config.objective import LossConfig
from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.objectives.weights import Signal, Weights
from megathunder.types import Trajectory


class Unit(Enum):
    """What a contribution is: a whole trajectory, or one turn of it."""

    TRAJECTORY = "trajectory"
    TURN = "turn"


class Need(Flag):
    """Inputs that the weight of a contribution waits for. DIVERGENCE: the learner compares it with the reference."""

    TOKENS = auto()
    REWARD = auto()
    TEACHER = auto()
    DIVERGENCE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Terms of the token loss (`learner/loss.py`) that the weight of a trajectory does not hold; 0: none.
    `old_by_learner`: ratios divide by the learner's log-probabilities under the weights that sampled."""

    importance_cap: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    kl_coefficient: float = 0.0
    old_by_learner: bool = False


@dataclass(frozen=True, slots=True)
class Reward:
    """What a verifier says of a trajectory: the reward, and its named parts where there are several rewards."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.value} ({dict(self.parts)})" if self.parts else str(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A trajectory that counts in the normaliser: its sampled tokens, its signal and its weight."""

    trained_tokens: int
    signal: Signal = ()
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Closing:
    """What becomes of a closed group. `weights` None: nothing of it enters the update; `replace`: another group is to
    be sampled in its place, and its tokens do not count."""

    weights: Weights | None
    replace: bool = False


class GroupView(Protocol):
    """What an objective may know of an open group: its distinct signals so far, in order of arrival."""

    @property
    def index(self) -> int: ...
    @property
    def values(self) -> list[Signal]: ...


class Objective:
    """See the module docstring. Subclasses are made once per run; `loss` says what sums are divided by."""

    name = ""
    unit = Unit.TRAJECTORY
    needs = Need.TOKENS | Need.REWARD
    starts_before_reward = False
    """A backward pass may start with the tokens alone (content-ready release)."""
    affine = True
    """Weights are affine in the rewards, so that more distinct rewards than classes share moments."""
    moments = 2
    """Moment accumulators of an open group: 1 + the rewards of a trajectory; as far as it is known before one comes."""
    reward_values = 2
    """Distinct signals of an open group that get a class accumulator each."""
    keeps_each_gradient = False
    """Every trajectory of an open group has an accumulator of its own, which the learner reads at the closure."""
    token_terms = TokenTerms()
    replaces_equal_groups = False
    """`close_group` may ask for a replacement, as its raw rewards decide."""

    def __init__(self, loss: LossConfig) -> None:
        self.loss = loss

    def check(self, config: Config) -> None:
        """ConfigError for settings of other rooms under which the sum could not be exact."""
        if self.unit is Unit.TRAJECTORY and config.streaming.release == "turn":
            raise ConfigError(
                f"streaming.release = 'turn' with objective = {config.objective!r}",
                expected="'trajectory' or 'turn_forward': a turn's weight needs the reward of the whole trajectory",
                remedy="set streaming.release = 'turn_forward' to run the forward passes of finished turns early",
            )
        if config.streaming.on_lost == "drop_group" and not self.waits_for_closure:
            raise ConfigError(
                f"streaming.on_lost = 'drop_group' with objective = {config.objective!r}",
                expected="'shrink' or 'fail': what is weighed before its group closes is in the sum already",
                remedy="set streaming.on_lost = 'shrink'",
            )

    @property
    def waits_for_closure(self) -> bool:
        """Weights are not known with the reward: open groups hold accumulators."""
        return self.unit is Unit.TRAJECTORY and self.opening_weights() is None

    @property
    def zero_weight_has_gradient(self) -> bool:
        """A loss term is not scaled by the weight (the KL term): no trajectory may be left out."""
        return self.token_terms.kl_coefficient > 0

    @property
    def needs_reference(self) -> bool:
        """The learner holds the policy as it was loaded."""
        return self.zero_weight_has_gradient or Need.DIVERGENCE in self.needs

    def signal(self, trajectory: Trajectory, reward: Reward, divergence: float = 0.0) -> Signal:
        """The rewards that are compared; `divergence`: sum_t (log pi - log ref) of its sampled tokens."""
        return (reward.value,)

    def opening_weights(self) -> Weights | None:
        """Weights that are known before a group closes; None where the closure tells."""
        return None

    def target(self, group: GroupView, signal: Signal | None, index: int) -> AccumulatorKey:
        """Accumulator of trajectory `index` while the weights of its group are unknown."""
        if signal is None or self.keeps_each_gradient:
            return AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, group.index, index)
        slot = group.values.index(signal)
        if slot < self.reward_values:
            return AccumulatorKey(AccumulatorKind.CLASS, group.index, slot)
        if self.affine:
            return AccumulatorKey(AccumulatorKind.MOMENT, group.index, 0)
        return AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, group.index, index)

    def close_group(self, rewards: Sequence[float], signals: Sequence[Signal]) -> Closing:
        """The closure of a group over its survivors: `rewards` as they came, `signals` as they are compared."""
        return Closing(self.opening_weights())

    def row_scale(self, trained_tokens: int) -> float:
        """Factor of a trajectory's rows beside its weight: 1 / (trained tokens of the trajectory, all its rows) under
        sequence_mean, else 1."""
        if self.loss.normalisation == "sequence_mean":
            return 1.0 / trained_tokens if trained_tokens else 0.0
        return 1.0

    def normaliser(self, survivors: Sequence[Survivor]) -> float:
        """Z: trained tokens or trajectories of every survivor, those with weight 0 included, or a constant."""
        if self.loss.normalisation == "token_mean":
            return float(sum(s.trained_tokens for s in survivors))
        if self.loss.normalisation == "sequence_mean":
            return float(len(survivors))
        return self.loss.constant

    def end_update(self, survivors: Sequence[Survivor]) -> None:
        """The update has ended; the next one may start from what it says."""

    def state(self) -> bytes:
        """What a checkpoint keeps of `end_update`; empty: nothing."""
        return b""

    def restore(self, data: bytes) -> None:
        """Go on from `state`."""


def weight_deviation(survivors: Sequence[Survivor]) -> float:
    """Standard deviation over the batch of weights whose mean in each group is 0."""
    return math.sqrt(math.fsum(s.weight**2 for s in survivors) / len(survivors)) if survivors else 0.0
