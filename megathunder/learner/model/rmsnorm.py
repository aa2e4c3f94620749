"""RMSNorm that knows about sequence parallelism.

    y = x r * weight,  r = 1 / sqrt(mean(x^2) + eps)
    dx = r (h - x r mean(h x r)),  h = dy * weight;  dweight = sum dy * x r

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, so the weight's gradient
must be summed over those ranks; Megatron does that for parameters marked `sequence_parallel`. Megatron's wrapper of the
torch norm refuses sequence parallelism instead. In float32 on a CPU its forward and backward are written out here:
torch has no fused kernel there and takes a pass over memory for every operation. Built by `layers.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megathunder.learner.cpu_kernels import own_norms


class RmsNorm(torch.nn.RMSNorm):
    """Takes the arguments Megatron gives to any norm of a layer spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width]."""
        plain = x.device.type == "cpu" and x.dtype is self.weight.dtype is torch.float32
        return _RmsNorm.apply(x, self.weight, self.eps) if plain and own_norms() else super().forward(x)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        factor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, factor)
        return (x * factor).mul_(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        scaled = x * factor
        width = x.shape[-1]
        dweight = (gradient * scaled).reshape(-1, width).sum(0)
        weighted = gradient * weight
        along = (weighted * scaled).sum(-1, keepdim=True).div_(-width)
        return torch.addcmul(weighted, scaled, along).mul_(factor), dweight, None
