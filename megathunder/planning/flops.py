"""Floating-point operations, counted from the rows that were executed, and utilisation.

Of a row of T tokens whose first P are cached context, with n = T - P computed, m of them trained, and L layers:

    matrices   2 N n        N: weights of the layers that a token multiplies with (of experts, the active ones)
    attention  2 L h d (T^2 - P^2)      scores and values of the causal half, h heads of size d
    output     2 V H m      logits are made only where the mask asks
    forward = matrices + attention + output;  backward = 2 forward

This is what an update needs, however its rows were released: every token forward and backward once. What the learner
executed beyond it is replay (deferred context gradients); recompute (one more forward) is counted apart as well:

    active MFU  = flops / (update wall * peak)       compute MFU = flops / (learner busy * peak)

Called by `aggregate.py` with every command the learner has done.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from megathunder.config.model_shape import ModelShape
from megathunder.hardware import gpu_of_device
from megathunder.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations by what they were for. `matrices`, `attention` and `output` are forward and backward together."""

    matrices: float = 0.0
    attention: float = 0.0
    output: float = 0.0
    recompute: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            matrices=self.matrices + other.matrices,
            attention=self.attention + other.attention,
            output=self.output + other.output,
            recompute=self.recompute + other.recompute,
        )

    @property
    def total(self) -> float:
        """What the update needs."""
        return self.matrices + self.attention + self.output


def forward_flops(shape: ModelShape, *, tokens: int, context: int = 0, trained: int = 0) -> Flops:
    """Operations of one forward pass over a row of `tokens` whose first `context` are cached."""
    return Flops(
        matrices=2.0 * shape.active_layer_matrices * (tokens - context),
        attention=2.0 * shape.layers * shape.heads * shape.head_size * (tokens**2 - context**2),
        output=2.0 * shape.embedding_parameters * trained,
    )


def row_flops(shape: ModelShape, row: TrainRow, *, recompute: bool = False, whole: bool = False) -> Flops:
    """Forward and backward of what `row` adds to its context; tokens before it were counted with the row they came in.

    `whole`: nothing follows the row, so what stands behind the token that predicts its last trained one is not computed
    (of T tokens that end with a trained one T - 1 are). `recompute`: the layers ran forward once more."""
    context, end = row.context_tokens, len(row.token_ids)
    if whole:
        end = max((t for t, trained in enumerate(row.loss_mask) if trained), default=0)
    once = forward_flops(shape, tokens=end, context=context, trained=sum(row.loss_mask[max(context, 1) :]))
    return Flops(
        matrices=3 * once.matrices,
        attention=3 * once.attention,
        output=3 * once.output,
        recompute=once.matrices + once.attention if recompute else 0.0,
    )


def utilisation(flops: float, seconds: float, peak_flops: float) -> float | None:
    """Share of what `peak_flops` a second could have done in `seconds`; None where the peak is unknown."""
    return flops / (seconds * peak_flops) if peak_flops > 0 and seconds > 0 else None


def known_peak(device_name: str) -> float:
    """Dense bfloat16 operations a second of the GPU that the driver calls so; 0 where it is not known."""
    gpu = gpu_of_device(device_name)
    return gpu.flops if gpu else 0.0


def measured_peak(size: int = 768, repeats: int = 5) -> float:
    """Operations a second of the best of some float32 matrix products on this CPU, with the threads numpy has."""
    import numpy  # only this function needs it

    left = numpy.random.default_rng(0).standard_normal((size, size), dtype=numpy.float32)
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best
