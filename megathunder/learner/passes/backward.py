"""One micro-batch: pack, forward, loss, and a backward that adds to whatever `param.main_grad` points at.

    pieces -> MicroBatch -> log-probabilities [N] -> row losses [R] -> backward with each row's scale

Forward and backward are apart, so that a pass can be held while the weights of its rows are unknown. A piece without
trained tokens still runs through the whole model: that is how deferred context gradients, injected at its keys and
values, reach the parameters. Called by `learner.py` and `prefix/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megathunder.learner.loss import TokenLoss, row_gaps
from megathunder.learner.model.attention import KeyValue
from megathunder.learner.passes.flop_cost import Price
from megathunder.learner.passes.packing import MicroBatch, PackedRow, pack
from megathunder.learner.passes.pipeline import Flow, Pipeline
from megathunder.learner.passes.reference_policies import FrozenCopy
from megathunder.work_stats import LogprobGap, SaltStats, WorkStats, add_known


@dataclass(slots=True, eq=False)
class WorkCounters:
    """Work of one command, added up as it is done; device scalars are read once, at the end."""

    price: Price
    tokens: int = 0
    trained_tokens: int = 0
    replay_tokens: int = 0
    flops: float = 0.0
    prompt_tokens_saved: int | None = None
    salt: SaltStats | None = None
    weight: float = 1.0  # of the losses: a coefficient that is applied to the gradient later
    _losses: list[Tensor] = field(default_factory=list)
    _divergences: list[Tensor] = field(default_factory=list)
    _gaps: list[Tensor] = field(default_factory=list)  # [2] each: sum and maximum of |learner - engine|
    _row_gaps: list[tuple[list[str], Tensor, float]] = field(default_factory=list)  # R sources, maxima [R], the alarm

    def forwarded(self, batch: MicroBatch, *, replay: bool = False) -> None:
        """Count a forward; tokens that are only computed again count as replayed."""
        self._operations(batch, passes=1)
        if replay:
            self.replay_tokens += batch.tokens
        else:
            self.tokens += batch.tokens
            self.trained_tokens += batch.trained_tokens

    def scored(self, batch: MicroBatch) -> None:
        """Count a forward under another version of the policy."""
        self._operations(batch, passes=1)

    def reversed(self, batch: MicroBatch) -> None:
        """Count a backward."""
        self._operations(batch, passes=2)

    def _operations(self, batch: MicroBatch, *, passes: int) -> None:
        spans = [(p.first, p.end) for p in batch.pieces if p.counted]
        self.flops += self.price.flops(spans, batch.trained_tokens, passes=passes)

    def loss(self, loss: Tensor) -> None:
        self._losses.append(loss * self.weight)

    def divergence(self, value: Tensor) -> None:
        """Add a device scalar: the loss term to the reference of a micro-batch, each row by its unit."""
        self._divergences.append(value)

    def save_prompt_tokens(self, tokens: int) -> None:
        """Count tokens of shared prompts that were not computed again; negative: computed once for all."""
        self.prompt_tokens_saved = add_known(self.prompt_tokens_saved, tokens)

    def reweighed(self, stats: SaltStats) -> None:
        """Count what was measured of gradients."""
        self.salt = add_known(self.salt, stats)

    def gap(self, batch: MicroBatch, logprobs: Tensor, alarm: float) -> None:
        """Record how far learner and engine are apart on the trained tokens, and in which rows by more than `alarm`."""
        if logprobs.numel():
            apart = (logprobs - batch.engine).abs()
            self._gaps.append(torch.stack([apart.sum(), apart.amax()]))
            if alarm > 0:
                self._row_gaps.append(([str(p.row.source) for p in batch.pieces], row_gaps(batch, logprobs), alarm))

    def _above_alarm(self) -> tuple[LogprobGap, ...]:
        found = [(source, nats, alarm) for s, n, alarm in self._row_gaps for source, nats in zip(s, n.tolist())]
        return tuple(LogprobGap(source, nats) for source, nats, alarm in found if nats > alarm)

    def stats(self, *, accumulator_bytes: int) -> WorkStats:
        gaps = torch.stack(self._gaps).tolist() if self._gaps else []
        return WorkStats(
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            loss_sum=float(torch.stack(self._losses).sum()) if self._losses else 0.0,
            logprob_diff_sum=sum(gap[0] for gap in gaps),
            logprob_diff_max=max((gap[1] for gap in gaps), default=0.0),
            logprob_gaps=self._above_alarm(),
            flops=self.flops,
            replay_tokens=self.replay_tokens,
            accumulator_bytes=accumulator_bytes,
            prompt_tokens_saved=self.prompt_tokens_saved,
            kl_sum=float(torch.stack(self._divergences).sum()) if self._divergences else None,
            salt=self.salt,
        )


@dataclass(slots=True, eq=False)
class Pass:
    """A forward that waits for its backward. The log-probabilities [N] are on the last stage alone."""

    batch: MicroBatch
    flow: Flow

    @property
    def logprobs(self) -> Tensor | None:
        return None if self.flow.result is None else self.flow.result.detach()


class Runner:
    """Runs micro-batches through this rank's part of the model."""

    def __init__(
        self, pipeline: Pipeline, loss: TokenLoss, *, device: torch.device, dtype: torch.dtype, pad_to: int = 1
    ) -> None:
        self._pipeline, self.token_loss, self._device, self._pad_to = pipeline, loss, device, pad_to
        self._dtype = torch.float64 if dtype is torch.float64 else torch.float32

    def forward(
        self,
        pieces: Sequence[PackedRow],
        counters: WorkCounters,
        *,
        captured: dict[int, KeyValue] | None = None,
        inject: dict[int, KeyValue] | None = None,
        replay: bool = False,
    ) -> Pass:
        """Forward of `pieces` in one sequence. `captured` and `inject` are those of `AttentionContext`."""
        batch = pack(pieces, self._device, dtype=self._dtype, pad_to=self._pad_to)
        context = batch.context
        context.captured, context.inject = captured, inject
        flow = self._pipeline.forward(batch.token_ids, context)
        context.captured = None  # a recomputation during backward must not write again
        counters.forwarded(batch, replay=replay)
        done = Pass(batch, flow)
        if done.logprobs is not None:
            counters.gap(batch, done.logprobs, self.token_loss.gap_alarm)
        return done

    def backward(self, held: Pass, counters: WorkCounters) -> None:
        """Add the gradient of sum_r scale_r loss_r, with the scales and scores of `held.batch` as they are now."""
        batch = held.batch

        def of_result() -> None:
            losses = self.token_loss.row_losses(batch, held.flow.result)
            roots, weights = [losses], [batch.scales]
            if batch.reference is not None:
                roots.append(self.token_loss.row_divergences(batch, held.flow.result))
                weights.append(batch.units * self.token_loss.kl_coefficient)
                counters.divergence(roots[1].detach() @ batch.units)
            torch.autograd.backward(roots, weights)
            counters.loss(losses.detach() @ batch.scales)

        self._pipeline.backward(held.flow, batch.context, of_result)
        counters.reversed(batch)

    def differentiate(
        self,
        pieces: Sequence[PackedRow],
        counters: WorkCounters,
        *,
        old: FrozenCopy | None = None,
        reference: FrozenCopy | None = None,
        again: bool = False,
    ) -> None:
        """Forward and backward of pieces whose weights are known; enough micro-batches to fill the pipeline.

        `old` and `reference` are other versions of the policy that the loss compares with; `again` counts the
        tokens as computed before."""
        held = [self.forward(part, counters, replay=again) for part in split(pieces, self._pipeline.stages)]
        for one in held:
            others = {"old": old, "reference": reference}
            scores = {name: self._score(one.batch, copy, counters) for name, copy in others.items() if copy}
            one.batch = replace(one.batch, **scores)
        for one in held:
            self.backward(one, counters)
        self.settle()

    def divergences(self, pieces: Sequence[PackedRow], reference: FrozenCopy, counters: WorkCounters) -> list[float]:
        """sum_t (log pi_engine - log pi_ref) of each piece over its trained tokens; zeros before the last stage."""
        batch = pack(pieces, self._device, dtype=self._dtype, pad_to=self._pad_to)
        logprobs = self._score(batch, reference, counters)
        self.settle()
        total = torch.zeros(len(pieces), dtype=torch.float64, device=self._device)
        if logprobs is not None:
            total.index_add_(0, batch.row_of, (batch.engine - logprobs).to(torch.float64))
        return total.tolist()

    def _score(self, batch: MicroBatch, copy: FrozenCopy, counters: WorkCounters) -> Tensor | None:
        """[N] log-probabilities of the trained tokens under another version of the policy, None before the last
        stage."""
        with copy.swapped_in():
            flow = self._pipeline.forward(batch.token_ids, batch.context)
        counters.scored(batch)
        return flow.result

    def settle(self) -> None:
        """Wait until everything sent to other stages has left."""
        self._pipeline.settle()


def split(pieces: Sequence[PackedRow], stages: int) -> list[list[PackedRow]]:
    """Micro-batches for a pipeline of `stages`: two a stage where there are pieces enough, of about equal tokens."""
    count = 1 if stages == 1 else min(len(pieces), 2 * stages)
    parts: list[list[PackedRow]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda p: -p.length):
        lightest = loads.index(min(loads))
        parts[lightest].append(piece)
        loads[lightest] += piece.length
    return parts if count > 1 else [list(pieces)]
