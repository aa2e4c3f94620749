"""What a measurement may see of a step. Called by `Learner.take_step` on every rank where a launcher passes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class StepObserver(Protocol):
    """`names` are Megatron's, `tensors` this rank's own shard of each; an observer changes none of them."""

    def gradient_reduced(self, update: int, names: Sequence[str], tensors: Sequence[Tensor], normaliser: float) -> None:
        """Before the clip: the gradient is `tensors` / `normaliser`."""

    def weights_stepped(self, update: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """After the optimizer's step, or after none was taken."""
