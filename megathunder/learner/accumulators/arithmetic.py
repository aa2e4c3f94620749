"""How accumulators add: in floating point, or exactly in 64-bit fixed point.

Floating point: the sum depends, in its last bits, on the order of arrival.
Fixed point: a gradient g becomes the integer q = round(g * 2^f), a coefficient c the integer k = round(c * 2^20), and

    batch = sum_i k_i q_i  =  sum_v k_v (sum_{i in v} q_i)        (units of 2^-(f+20))

holds exactly in integers, so direct and class accumulation, every order of arrival and every assignment to ranks give
the same bits. `f` is fixed by the range the user allows. |batch| <= sum_i |k_i| max|q_i| is carried along in unbounded
integers and refused, by bucket and value, before it could leave 63 bits. Called by the store alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megathunder.errors import UserError
from megathunder.learner.accumulators.layout import Flats, GradientLayout
from megathunder.learner.accumulators.shards import Shards

COEFFICIENT_BITS = 20
_LIMIT = 1 << 62
_CHUNK = 1 << 17  # elements worked on at once: stays in cache


@dataclass(slots=True, eq=False)
class Accumulator:
    """`flats` hold the sum, or this rank's part of it (then without `views`); `bounds` bound each bucket's largest
    integer (fixed point only); `fresh`: what `flats` hold means nothing yet, the sum is zero (host memory only)."""

    flats: Flats
    views: list[Tensor] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    fresh: bool = False


class FloatArithmetic:
    """Sums in the type of Megatron's gradient buffers (at least float32)."""

    exact = False

    def __init__(self, layout: GradientLayout) -> None:
        self._layout = layout

    def allocate(self, device: torch.device | None = None, shards: Shards | None = None) -> Accumulator:
        """A zero accumulator, or this rank's part of one; on `device` where given (pinned where that is the host of a
        CUDA rank)."""
        flats = []
        for home in shards.parts(self._layout.homes) if shards else self._layout.homes:
            pinned = device is not None and device.type == "cpu" and home.is_cuda
            flats.append(torch.zeros(home.numel(), dtype=home.dtype, device=device or home.device, pin_memory=pinned))
        return Accumulator(flats, [] if shards else self._layout.views(flats))

    def zero(self, accumulator: Accumulator) -> None:
        for flat in accumulator.flats:
            flat.zero_()

    def deposit(self, target: Accumulator, gradient: Flats, coefficient: float) -> None:
        """target += coefficient * gradient."""
        for into, part in zip(target.flats, gradient, strict=True):
            into.add_(part.to(into.device), alpha=coefficient)

    def combine(self, target: Accumulator, source: Accumulator, coefficient: float, *, batch: bool) -> None:
        """target += coefficient * source."""
        self.deposit(target, source.flats, coefficient)


class FixedPointArithmetic:
    """Exact sums; `largest` bounds sum_i |coefficient_i| max|g_i| of an update."""

    exact = True

    def __init__(self, layout: GradientLayout, largest: float) -> None:
        self._layout = layout
        self.fraction_bits = 62 - COEFFICIENT_BITS - math.ceil(math.log2(largest))
        self._step = 2.0**self.fraction_bits

    def allocate(self, device: torch.device | None = None, shards: Shards | None = None) -> Accumulator:
        homes = shards.parts(self._layout.homes) if shards else self._layout.homes
        flats = [torch.zeros(h.numel(), dtype=torch.int64, device=device or h.device) for h in homes]
        return Accumulator(flats, [], [0] * len(flats))

    def zero(self, accumulator: Accumulator) -> None:
        for flat in accumulator.flats:
            flat.zero_()
        accumulator.bounds = [0] * len(accumulator.flats)

    def deposit_part(self, target: Accumulator, gradient: Flats, shards: Shards) -> None:
        """target, this rank's part, += the sum of `gradient` over the ranks that share it, each rounded by itself."""
        for bucket, (into, part) in enumerate(zip(target.flats, gradient, strict=True)):
            if not part.numel():
                continue
            scaled = self._largest(part) * self._step
            units = min(math.ceil(scaled) + 1, _LIMIT) if math.isfinite(scaled) else _LIMIT
            units, value = shards.agree(bucket, units, scaled / self._step)
            self._grow(target, bucket, units, value)
            for at, stacked in shards.stacked(bucket, part):
                whole = stacked.to(torch.float64).mul_(self._step).round_().to(torch.int64)
                mine = into[at : at + whole.shape[1]]
                mine.add_(shards.sum(bucket, whole)[: mine.numel()].to(into.device))

    def deposit(self, target: Accumulator, gradient: Flats, coefficient: float | None) -> None:
        """target += gradient, in units of 2^-f; with a coefficient also times k (the batch's units)."""
        factor = 1 if coefficient is None else round(coefficient * (1 << COEFFICIENT_BITS))
        for bucket, (into, part) in enumerate(zip(target.flats, gradient, strict=True)):
            if not part.numel():
                continue
            value = self._largest(part)
            largest = self._units(bucket, value)
            self._grow(target, bucket, largest * abs(factor), value)
            for at in range(0, part.numel(), _CHUNK):
                whole = part[at : at + _CHUNK].to(torch.float64).mul_(self._step).round_().to(torch.int64)
                into[at : at + _CHUNK].add_(whole.to(into.device), alpha=factor)

    def combine(self, target: Accumulator, source: Accumulator, coefficient: float, *, batch: bool) -> None:
        """target += coefficient * source; only the batch takes coefficients other than whole numbers."""
        factor = round(coefficient * (1 << COEFFICIENT_BITS)) if batch else round(coefficient)
        if not batch and factor != coefficient:
            raise UserError(
                f"a coefficient of {coefficient} between two open accumulators under accumulator = exact",
                expected="whole numbers there: fractions would have to be rounded twice",
                remedy="keep one class accumulator for each distinct reward (no moments), or use accumulator = fp32",
            )
        for bucket, (into, part) in enumerate(zip(target.flats, source.flats, strict=True)):
            self._grow(target, bucket, source.bounds[bucket] * abs(factor), float(source.bounds[bucket]) / self._step)
            into.add_(part.to(into.device), alpha=factor)

    def to_float(self, batch: Accumulator, homes: Flats) -> None:
        """Write the batch's value into Megatron's buffers; the same integers give the same floats."""
        unit = 1.0 / (self._step * (1 << COEFFICIENT_BITS))
        for flat, home in zip(batch.flats, homes, strict=True):
            for at in range(0, flat.numel(), _CHUNK):
                home[at : at + _CHUNK] = flat[at : at + _CHUNK].to(torch.float64).mul_(unit).to(home.dtype)

    def check_total(self, bounds: list[int]) -> None:
        """Refuse a sum over ranks that could leave 63 bits."""
        for bucket, bound in enumerate(bounds):
            if bound >= _LIMIT:
                self._refuse(bucket, float(bound) / self._step / (1 << COEFFICIENT_BITS))

    @staticmethod
    def _largest(part: Tensor) -> float:
        low, high = torch.aminmax(part)
        return max(abs(float(low)), abs(float(high)))

    def _units(self, bucket: int, value: float) -> int:
        scaled = value * self._step
        if not math.isfinite(scaled):
            self._refuse(bucket, value)
        return math.ceil(scaled) + 1

    def _grow(self, target: Accumulator, bucket: int, by: int, value: float) -> None:
        target.bounds[bucket] += by
        if target.bounds[bucket] >= _LIMIT:
            self._refuse(bucket, value)

    def _refuse(self, bucket: int, value: float) -> None:
        raise UserError(
            f"exact accumulator: gradient bucket {bucket} received a value of {value:.6g}, which may overflow 63 bits "
            f"at 2^-{self.fraction_bits} a unit",
            expected="finite gradients whose sum of |coefficient| x |value| stays below learner.exact_range",
            remedy="raise learner.exact_range (each doubling costs one bit of resolution) or use accumulator = fp32",
        )
