"""Context parallelism: the tokens of a micro-batch spread over ranks, invisible to whoever calls the model.

    ids [1, T] --pick--> own T / c tokens --layers--> hidden [T / c] --gather--> hidden [T] --output layer--> as before
    attention: [T / c, heads] --all-to-all--> [T, heads / c] --PackedAttention--> --all-to-all--> [T / c, heads]

Inside attention ranks exchange tokens for heads (DeepSpeed-Ulysses, Jacobs et al. 2023), so each sees whole rows of its
heads: prefixes, captured keys and deferred gradients work unchanged, and no rank has more to do than another. All
compute the same loss from the gathered hidden states; each logit's gradient counts 1 / c, so that the sum over ranks,
which Megatron's gradient reduction makes, is the gradient. The vocabulary projection is thus computed c times.

With sequence parallelism over t ranks, tokens go in blocks of T / (c t): block b to context rank b % c, tensor rank
b // c, which leaves every gather in token order. Installed by `model.build_model`. Refuses fewer key/value heads a rank
than context ranks, and T that does not divide (`ModelBundle.pad_to`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megathunder.learner.model.attention import PackedAttention


class ContextAttention(PackedAttention):
    """PackedAttention over context ranks; q [T / c, 1, heads, head] -> [T / c, 1, heads * head]."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        self._group = parallel_state.get_context_parallel_group()
        self._blocks = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
        whole = [_TokensForHeads.apply(x, self._group, self._blocks) for x in (query, key, value)]
        heads, head = whole[0].shape[2:]
        out = super().forward(*whole, *arguments, **named).unflatten(2, (heads, head))
        return _HeadsForTokens.apply(out, self._group, self._blocks).flatten(2)


def install_context_parallel(stage: GPTModel, config: TransformerConfig) -> None:
    """Install the picking, the gather and the gradient's weight on one stage."""
    group = parallel_state.get_context_parallel_group()
    size, blocks = group.size(), config.tensor_model_parallel_size if config.sequence_parallel else 1

    def pick(module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = {n: named[n].unflatten(1, (blocks, size, -1))[:, :, group.rank()].flatten(1) for n in named}
        return arguments, own

    if stage.pre_process:
        stage.embedding.register_forward_pre_hook(pick, with_kwargs=True)
    if stage.post_process:
        stage.decoder.register_forward_hook(lambda module, inputs, hidden: _Gather.apply(hidden, group))
        stage.output_layer.register_forward_hook(lambda module, inputs, out: (_Share.apply(out[0], size), out[1]))


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """parts [c, ...]: part i goes to rank i; answers [c, ...] of what came."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(x: Tensor, group: dist.ProcessGroup, blocks: int) -> Tensor:
    """[T / c, 1, h, d] of own tokens -> [T, 1, h / c, d] of own heads, tokens in order."""
    size = group.size()
    received = _exchange(x.unflatten(2, (size, -1)).movedim(2, 0), group)  # [c, T / c, 1, h / c, d]
    return received.unflatten(1, (blocks, -1)).transpose(0, 1).flatten(0, 2)


def _to_tokens(x: Tensor, group: dist.ProcessGroup, blocks: int) -> Tensor:
    """The inverse of `_to_heads`."""
    size = group.size()
    parts = x.unflatten(0, (blocks, size, -1)).transpose(0, 1).flatten(1, 2)  # [c, T / c, 1, h / c, d]
    return _exchange(parts, group).movedim(0, 2).flatten(2, 3)


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, blocks: int) -> Tensor:
        ctx.how = (group, blocks)
        return _to_heads(x, group, blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(gradient, *ctx.how), None, None


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, blocks: int) -> Tensor:
        ctx.how = (group, blocks)
        return _to_tokens(x, group, blocks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(gradient, *ctx.how), None, None


class _Gather(torch.autograd.Function):
    """hidden of own tokens -> hidden of all; backward sums the gradients of all ranks and keeps the own part."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(hidden) for _ in range(group.size())]
        dist.all_gather(parts, hidden.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


class _Share(torch.autograd.Function):
    """Identity whose gradient counts 1 / c."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int) -> Tensor:
        ctx.size = size
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.size, None
