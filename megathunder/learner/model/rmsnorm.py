"""RMSNorm that knows about sequence parallelism.

    y = x / sqrt(mean(x^2) + eps) * weight

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, so the weight's gradient
must be summed over those ranks; Megatron does that for parameters marked `sequence_parallel`. Megatron's wrapper of the
torch norm refuses sequence parallelism instead. Built by the layer spec of `model.py`.
"""

from __future__ import annotations

from typing import Any

import torch


class RmsNorm(torch.nn.RMSNorm):
    """Takes the arguments Megatron gives to any norm of a layer spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
