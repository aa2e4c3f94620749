"""Carries one micro-batch through the pipeline stages, forward and backward apart.

    forward    stage 0 -> 1 -> ... -> last              each rank keeps (input, output) of its chunks in a `Flow`
    backward   last -> ... -> 1 -> 0                    gradients of the inputs travel back

A flow may be held between the two for as long as its coefficients are unknown, which Megatron's own schedules do not
allow. Several flows at once fill the pipeline (GPipe): stage s works on one while stage s + 1 works on the one before.
Sends are asynchronous, receives block, and every rank runs the same flows in the same order, so nothing can deadlock.
With virtual stages a rank holds several chunks and the flow passes it once for each. Called by `backward.Runner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megathunder.learner.model.attention import AttentionContext
from megathunder.learner.parallel import Layout


@dataclass(slots=True, eq=False)
class Flow:
    """A forward in progress. `result` [N] is there on the last stage alone; an edge is None where the pipeline ends."""

    result: Tensor | None = None
    edges: list[tuple[Tensor | None, Tensor | None]] = field(default_factory=list)  # (input, output) of each chunk


class Pipeline:
    """The chunks of this rank. One stage and no neighbours is the common case and costs nothing."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        layout: Layout,
        hidden: int,
        dtype: torch.dtype,
        *,
        token_share: int = 1,
    ) -> None:
        """Between layers a rank holds one in `token_share` tokens (sequence and context parallelism)."""
        self._chunks, self._layout, self._hidden, self._dtype = list(chunks), layout, hidden, dtype
        self._token_share = token_share
        self._sent: list[tuple[dist.Work, Tensor]] = []
        if layout.pipeline > 1:
            self._group = parallel_state.get_pipeline_model_parallel_group()
            self._ranks = dist.get_process_group_ranks(self._group)

    @property
    def stages(self) -> int:
        return self._layout.pipeline

    def forward(self, token_ids: Tensor, context: AttentionContext) -> Flow:
        """Run this rank's chunks of one micro-batch; token_ids [1, T]."""
        flow = Flow()
        positions = context.position_ids[None]
        for index, chunk in enumerate(self._chunks):
            received = None if self._first(index) else self._receive(context, self._layout.pipeline_rank - 1)
            if received is not None:
                received.requires_grad_()
                chunk.module.set_input_tensor(received)
            out = chunk(token_ids, positions, None, packed_seq_params=context)
            if self._last(index):
                flow.result, out = out, None
            else:
                self._send(out.detach(), self._layout.pipeline_rank + 1)
            flow.edges.append((received, out))
        return flow

    def backward(self, flow: Flow, context: AttentionContext, of_result: Callable[[], None]) -> None:
        """Run the chunks back; `of_result` starts the backward of the loss, on the last stage."""
        for index in reversed(range(len(self._chunks))):
            received, out = flow.edges[index]
            if self._last(index):
                of_result()
            else:
                out.backward(self._receive(context, self._layout.pipeline_rank + 1))
            if received is not None:
                self._send(received.grad, self._layout.pipeline_rank - 1)
        flow.edges.clear()
        flow.result = None

    def settle(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _first(self, index: int) -> bool:
        return index == 0 and self._layout.is_first_stage

    def _last(self, index: int) -> bool:
        return index == len(self._chunks) - 1 and self._layout.is_last_stage

    def _send(self, tensor: Tensor, stage: int) -> None:
        tensor = tensor.contiguous()
        self._sent.append((dist.isend(tensor, self._ranks[stage % self.stages], group=self._group), tensor))

    def _receive(self, context: AttentionContext, stage: int) -> Tensor:
        shape = (context.tokens // self._token_share, 1, self._hidden)
        into = torch.empty(shape, dtype=self._dtype, device=self._layout.device)
        dist.recv(into, self._ranks[stage % self.stages], group=self._group)
        return into
