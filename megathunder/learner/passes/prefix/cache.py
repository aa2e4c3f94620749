"""Keys and values of earlier tokens as leaves of a later pass, and the deferred gradients that land on them.

    later pass attends to   leaves(C)           C tokens computed before, detached
    its backward leaves     dK, dV on them      added into `deferred_grad`, which grows with the context

Backward is linear in what arrives from above, so what several later passes leave on a token is added up and injected
once at that token's own keys and values. Called by `eager.py`, `forward.py` and `prompt.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megathunder.learner.model.attention import KeyValue, Prefix

Layers = dict[int, KeyValue]  # layer number -> (k, v) or (dK, dV), [tokens, groups, head]


@dataclass(slots=True, eq=False)
class Cache:
    """Keys and values of the first `tokens` tokens of one chain, and the gradients deferred to them."""

    tokens: int = 0
    layers: Layers = field(default_factory=dict)
    deferred_grad: Layers = field(default_factory=dict)

    def leaves(self) -> Prefix:
        """All tokens as fresh leaves."""
        fresh = {n: (k.detach().requires_grad_(), v.detach().requires_grad_()) for n, (k, v) in self.layers.items()}
        return Prefix(fresh, self.tokens)

    def extend(self, captured: Layers, start: int, count: int) -> None:
        """Append `count` tokens that lie at `start` of a micro-batch."""
        for number, (k, v) in captured.items():
            k, v = k[start : start + count], v[start : start + count]
            if number in self.layers:
                before = self.layers[number]
                k, v = torch.cat([before[0], k]), torch.cat([before[1], v])
            self.layers[number] = (k, v)
        self.tokens += count

    def add_deferred(self, gradients: Layers) -> None:
        """Add dK, dV of the first tokens; the longer of the two arrays keeps its length."""
        add_leading(self.deferred_grad, gradients)


def leaf_gradients(prefix: Prefix) -> Layers:
    """What backward left on the leaves of `prefix`."""
    return {n: (k.grad, v.grad) for n, (k, v) in prefix.layers.items() if k.grad is not None and v.grad is not None}


def add_leading(into: Layers, gradients: Layers, coefficient: float = 1.0) -> None:
    """into += coefficient * gradients, both starting at token 0."""
    for number, pair in gradients.items():
        if number not in into:
            into[number] = tuple(g * coefficient for g in pair) if coefficient != 1.0 else pair
            continue
        into[number] = tuple(_longer(a, b, coefficient) for a, b in zip(into[number], pair, strict=True))


def _longer(held: Tensor, new: Tensor, coefficient: float) -> Tensor:
    if held.shape[0] >= new.shape[0]:
        held = held.clone()
        held[: new.shape[0]].add_(new, alpha=coefficient)
        return held
    out = new * coefficient
    out[: held.shape[0]].add_(held)
    return out


def laid_out(parts: Sequence[tuple[int, int, int, Layers]], tokens: int) -> Layers:
    """Gradients to inject into a micro-batch of `tokens` tokens.

    A part (start, first, end, deferred_grad) puts the deferred gradients of tokens [first, end) of a chain at `start`;
    where there are fewer, zeros are left.
    """
    out: Layers = {}
    for start, first, end, deferred_grad in parts:
        for number, pair in deferred_grad.items():
            if number not in out:
                out[number] = tuple(torch.zeros(tokens, *g.shape[1:], dtype=g.dtype, device=g.device) for g in pair)
            for into, gradient in zip(out[number], pair, strict=True):
                count = min(end, gradient.shape[0]) - first
                if count > 0:
                    into[start : start + count] += gradient[first : first + count]
    return out
