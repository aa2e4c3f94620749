"""Log-probabilities of the trained tokens only, from the last hidden states.

    log pi(y) = z_y - log sum_v exp z_v,   z = logits / temperature

The hidden states of the positions that predict a trained token are picked *before* the output layer, so the vocabulary
projection and its [N, V] logits exist for N trained tokens and not for all T. With tensor parallelism the vocabulary
is split and the three sums are reduced over the group. `attach` puts this in the place of `GPTModel._postprocess`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megathunder.learner.model.attention import AttentionContext


def attach(model: GPTModel, temperature: float) -> None:
    """Make `model(...)` answer the log-probabilities [N] of `context.targets` (hidden states before the last stage)."""
    model._postprocess = partial(_head, model, temperature)


def _head(
    model: GPTModel,
    temperature: float,
    *,
    hidden_states: Tensor,
    packed_seq_params: AttentionContext,
    **unused: Any,
) -> Tensor:
    if not model.post_process:
        return hidden_states
    return token_logprobs(model, hidden_states, packed_seq_params.predict, packed_seq_params.targets, temperature)


def token_logprobs(model: GPTModel, hidden: Tensor, predict: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """hidden [T, 1, H] -> log-probabilities [N], float32 or wider, of `targets` [N] at positions `predict` [N]."""
    layer = model.output_layer
    group = model.pg_collection.tp
    split = layer.sequence_parallel
    if split:
        # The output layer, told that nothing is split, sums its input gradient over ranks; each then keeps its part.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
    picked = hidden.index_select(0, predict)
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    layer.sequence_parallel = False
    logits, _ = layer(picked, weight=weight)  # [N, 1, V / tensor_parallel]
    layer.sequence_parallel = split
    logits = logits.squeeze(1)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return _TokenLogprob.apply(logits, targets, group if group.size() > 1 else None)


class _TokenLogprob(torch.autograd.Function):
    """logits [N, V_local], targets [N] (global ids) -> [N]; keeps one [N, V_local] array for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        highest = logits.amax(-1) if logits.shape[0] else logits.new_zeros(0)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest[:, None]
        first = 0 if group is None else group.rank() * logits.shape[1]
        local = (targets - first).clamp(0, logits.shape[1] - 1)
        here = (targets >= first) & (targets < first + logits.shape[1])
        target = shifted.gather(1, local[:, None]).squeeze(1).masked_fill_(~here, 0.0)
        probability = shifted.exp_()
        total = probability.sum(-1)
        if group is not None:
            both = torch.stack([target, total])
            dist.all_reduce(both, group=group)
            target, total = both
        probability.div_(total[:, None])
        ctx.save_for_backward(probability, local, here)
        return target - total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probability, local, here = ctx.saved_tensors
        out = probability * -gradient[:, None]
        out.scatter_add_(1, local[:, None], (gradient * here)[:, None])
        return out, None, None
