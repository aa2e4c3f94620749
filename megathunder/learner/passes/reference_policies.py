"""Other versions of the policy in the same parallel layout: a frozen reference, and the weights before the last step.

A copy of the trained parameters (with low-rank adapters: of the adapters) is swapped in for a forward pass without
gradient and swapped out again; no second model, no second process group. Memory: one more set of trained parameters.
Called by `backward.Runner` for the KL term and for the ratios of one_step_off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megathunder.config.root import Config
from megathunder.objectives.build_objective import build_objective
from megathunder.schedule.schedules import RULES


class FrozenCopy:
    """A copy of `parameters` as they are now; `refresh` takes them again."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._copies: list[Tensor] = [p.detach().clone() for p in self._parameters]

    def refresh(self) -> None:
        """Take the current weights."""
        torch._foreach_copy_(self._copies, [p.detach() for p in self._parameters])

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the copy inside the body, without gradient."""
        own = [p.data for p in self._parameters]
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.data = copy
        try:
            with torch.no_grad():
                yield
        finally:
            for parameter, data in zip(self._parameters, own, strict=True):
                parameter.data = data


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePolicies:
    """`reference` is the policy as it was loaded, `old` that of the update before; None where nothing needs them."""

    reference: FrozenCopy | None = None
    old: FrozenCopy | None = None

    @classmethod
    def of(cls, config: Config, parameters: Sequence[torch.nn.Parameter]) -> ReferencePolicies:
        """What `config` needs."""
        objective = build_objective(config)
        delayed = RULES[config.schedule].samples_ahead and objective.token_terms.old_by_learner
        return cls(
            reference=FrozenCopy(parameters) if objective.needs_reference else None,
            old=FrozenCopy(parameters) if delayed else None,
        )

    def refresh_old_policy(self) -> None:
        """The weights are about to move: what samples next is one step behind them."""
        if self.old:
            self.old.refresh()
