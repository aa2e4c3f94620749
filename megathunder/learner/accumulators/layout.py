"""Where each parameter's gradient lies in Megatron's flat gradient buffers, and how to point it elsewhere.

Megatron adds a backward pass into `param.main_grad`, a view of a flat buffer (`ddp.buffers[i].grad_data`). A set of
flat tensors of the same sizes is an accumulator: views at the same offsets make backward add there instead, with no
copy, and fused weight-gradient kernels keep working. Called by the store, the optimizer step and the tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

Flats = list[Tensor]  # one 1-D tensor a gradient buffer, dense buffers first


def groups_of_buffers(
    chunks: Sequence[DistributedDataParallel], dense: dist.ProcessGroup | None, expert: dist.ProcessGroup | None
) -> list[dist.ProcessGroup | None]:
    """`dense` or `expert` for each of Megatron's buffers, in the order of `GradientLayout.homes`."""
    groups: list[dist.ProcessGroup | None] = []
    for chunk in chunks:
        groups += [dense] * len(chunk.buffers) + [expert] * len(chunk.expert_parallel_buffers)
    return groups


class GradientLayout:
    """The gradient buffers of this rank's model chunks. `homes` are Megatron's own buffers."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        buffers = [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self.homes: Flats = [b.grad_data for b in buffers]
        self.names: list[str] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._slots: list[tuple[int, int]] = []  # (buffer, first element)
        places = {home.untyped_storage().data_ptr(): i for i, home in enumerate(self.homes)}
        for chunk in chunks:
            for name, parameter in chunk.module.named_parameters():
                if not parameter.requires_grad:
                    continue
                self.names.append(name)
                self.parameters.append(parameter)
                view = parameter.main_grad
                self._slots.append((places[view.untyped_storage().data_ptr()], view.storage_offset()))
        self.home_views = self.views(self.homes)
        self._current: Sequence[Tensor] | None = None

    @property
    def elements(self) -> int:
        """Gradient elements of this rank, Megatron's padding included."""
        return sum(home.numel() for home in self.homes)

    def views(self, flats: Flats) -> list[Tensor]:
        """One view a parameter, in the order of `parameters`."""
        found = zip(self._slots, self.parameters, strict=True)
        return [flats[b][at : at + p.numel()].view(p.shape) for (b, at), p in found]

    def point(self, views: Sequence[Tensor]) -> None:
        """Make the next backward add into `views`."""
        if views is self._current:
            return
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.main_grad = view
        self._current = views

    def point_home(self) -> None:
        """Back to Megatron's own buffers, which reduction and step read."""
        self.point(self.home_views)
