"""What every objective answers: what a contribution waits for, where its gradient is added, what the sum is divided by.

    kind      target of the backward pass         known when
    direct    the batch accumulator               the weight is known
    class     C_v of its group, one per reward    its reward is known; group: sum_v (a v + c) C_v
    moment    S0 and S1 of its group              its reward is known; group: a S1 + c S0
    own       an accumulator of its own           its tokens are known

Losses are minimised; a row's loss is scale * sum_t mask_t w_t (-log pi_t). Called by the scheduler, which never looks
inside. `build_objective` refuses combinations that cannot be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Flag, auto
from typing import Protocol

from megathunder.config.objective import LossConfig
from megathunder.types import AccumulatorKey, FoldTerm, Trajectory


class Need(Flag):
    """Inputs that a backward pass of a contribution waits for."""

    TOKENS = auto()
    REWARD = auto()
    TEACHER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """What the normaliser needs of one trajectory that counts."""

    trained_tokens: int


class GroupView(Protocol):
    """What an objective may know of an open group: its distinct rewards so far, in order of arrival."""

    @property
    def index(self) -> int: ...
    @property
    def values(self) -> list[float]: ...


class Objective(Protocol):
    """One objective; see the module docstring."""

    name: str
    grouped: bool
    waits_for: Need

    @property
    def waits_for_divergence(self) -> bool:
        """Whether the learner must compare a trajectory with the reference before its reward is known."""

    def shape(self, trajectory: Trajectory, reward: float, divergence: float = 0.0) -> float:
        """The reward that enters the statistics; `divergence`: sum_t (log pi - log ref) of its sampled tokens."""

    def row_scale(self, trained_tokens: int) -> float:
        """Factor of a trajectory's rows beside its coefficient (1/length under sequence_mean)."""

    def target(self, group: GroupView, reward: float | None, index: int) -> AccumulatorKey:
        """Where a trajectory whose group is still open is added."""

    def normaliser(self, survivors: list[Survivor]) -> float:
        """Z of the batch."""


def normaliser(loss: LossConfig, survivors: list[Survivor]) -> float:
    """Z: trained tokens or trajectories of every survivor, those with weight 0 included, or a constant."""
    if loss.normalisation == "token_mean":
        return float(sum(s.trained_tokens for s in survivors))
    if loss.normalisation == "sequence_mean":
        return float(len(survivors))
    return loss.constant


def row_scale(loss: LossConfig, trained_tokens: int) -> float:
    """1 / (trained tokens of the trajectory, all its rows) under sequence_mean, else 1."""
    if loss.normalisation == "sequence_mean":
        return 1.0 / trained_tokens if trained_tokens else 0.0
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Closure:
    """Accumulator arithmetic: apply `terms`, then release `free`."""

    terms: tuple[FoldTerm, ...]
    free: tuple[AccumulatorKey, ...]
