"""One micro-batch: pack, forward, loss, and a backward that adds to whatever `param.main_grad` points at.

    pieces -> MicroBatch -> log-probabilities [N] -> row losses [R] -> backward with each row's scale

Forward and backward are apart, so that a pass can be held while the coefficient of its rows is unknown. A piece without
trained tokens still runs through the whole model: that is how deferred context gradients, injected at its keys and
values, reach the parameters. Called by `learner.py` and `prefix.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megathunder.learner.attention import KeyValue
from megathunder.learner.loss import TokenLoss
from megathunder.learner.packing import MicroBatch, Piece, pack
from megathunder.learner.price import Price
from megathunder.types import TrainRow, WorkStats


@dataclass(slots=True, eq=False)
class Tally:
    """Work of one command, added up as it is done; device scalars are read once, at the end."""

    price: Price
    tokens: int = 0
    trained_tokens: int = 0
    replay_tokens: int = 0
    flops: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    _sums: list[Tensor] = field(default_factory=list)  # [3] each: loss, sum and maximum of |difference|

    def computed(self, batch: MicroBatch, *, passes: int, replayed: bool = False) -> None:
        """Count tokens and operations; what is replayed counts as operations and as replayed tokens only."""
        spans = [(p.first, p.end) for p in batch.pieces]
        self.flops += self.price.flops(spans, batch.trained_tokens, passes=passes)
        if replayed:
            self.replay_tokens += batch.tokens
        else:
            self.tokens += batch.tokens
            self.trained_tokens += batch.trained_tokens

    def observe(self, loss: Tensor, batch: MicroBatch, logprobs: Tensor) -> None:
        """Record the loss and how far learner and engine are apart on the trained tokens."""
        gap = (logprobs - batch.engine).abs()
        highest = gap.amax() if gap.numel() else gap.new_zeros(())
        self._sums.append(torch.stack([loss.to(gap.dtype), gap.sum(), highest]))

    def stats(self, *, accumulator_bytes: int) -> WorkStats:
        rows = torch.stack(self._sums).tolist() if self._sums else []
        return WorkStats(
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            loss_sum=sum(row[0] for row in rows),
            logprob_diff_sum=sum(row[1] for row in rows),
            logprob_diff_max=max((row[2] for row in rows), default=0.0),
            flops=self.flops,
            replay_tokens=self.replay_tokens,
            accumulator_bytes=accumulator_bytes,
            extra=self.extra,
        )


@dataclass(slots=True, eq=False)
class Pass:
    """A forward that waits for its backward: `losses` [R] without scale, attached to the graph."""

    batch: MicroBatch
    logprobs: Tensor  # [N], detached
    losses: Tensor | None

    def backward(self, scales: Tensor | None = None) -> Tensor:
        """Add the gradient of sum_r scale_r loss_r and free the graph; returns that loss, detached."""
        scales = self.batch.scales if scales is None else scales
        losses, self.losses = self.losses, None
        losses.backward(scales)
        return losses.detach() @ scales


class Runner:
    """Runs the model of this rank. `model(ids, positions, None, packed_seq_params=context)` answers [N]."""

    def __init__(
        self,
        model: Callable[..., Tensor],
        loss: TokenLoss,
        *,
        device: torch.device,
        dtype: torch.dtype,
        pad_to: int = 1,
    ) -> None:
        self._model, self._loss = model, loss
        self.device, self._pad_to = device, pad_to
        self._dtype = torch.float64 if dtype is torch.float64 else torch.float32

    def forward(
        self,
        pieces: Sequence[Piece],
        *,
        captured: dict[int, KeyValue] | None = None,
        inject: dict[int, KeyValue] | None = None,
    ) -> Pass:
        """Forward of `pieces` in one sequence. `captured` and `inject` are those of `AttentionContext`."""
        batch = pack(pieces, self.device, dtype=self._dtype, pad_to=self._pad_to)
        context = batch.context
        context.captured, context.inject = captured, inject
        logprobs = self._model(batch.token_ids, context.position_ids[None], None, packed_seq_params=context)
        losses = self._loss.row_losses(batch, logprobs)
        return Pass(batch, logprobs.detach(), losses)

    def differentiate(self, pieces: Sequence[Piece], tally: Tally) -> None:
        """Forward and backward of pieces whose scales are known."""
        done = self.forward(pieces)
        loss = done.backward()
        tally.computed(done.batch, passes=3)
        tally.observe(loss, done.batch, done.logprobs)


def scaled(row: TrainRow, scale: float) -> TrainRow:
    """`row` with another scale."""
    return TrainRow(**{**{f: getattr(row, f) for f in row.__struct_fields__}, "scale": scale})
