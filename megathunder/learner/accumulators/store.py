"""The accumulators of a cell: one for the batch, some for every open group, handed out from a pool.

    key kind   backward adds into                              at closure
    batch      Megatron's gradient buffer (with A_i)            -
    class      C_v                                              batch += (a v + c) C_v
    moment     a zeroed scratch; S_k += phi_k it                batch += c_k S_k
    own        g_i                                              batch += A_i g_i

`collect(key)` points `param.main_grad` at the right buffers for the backward passes of its body. Under exact
arithmetic, and for accumulators on host memory, every backward goes through a scratch on the device: Megatron's own
buffer in exact mode (the batch is then integers elsewhere), a spare one otherwise, two in turn on a GPU, so that one
empties into host memory (`host.py`) while the next backward fills the other. With `shards` each rank holds a part of
every accumulator but the batch (`shards.py`), filled through a scratch as well.
Called by `learner.py`. Refuses to fold an accumulator that nothing was added to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.errors import MegathunderError, UserError
from megathunder.learner.accumulators.arithmetic import Accumulator, FixedPointArithmetic, FloatArithmetic
from megathunder.learner.accumulators.host import HostTraffic
from megathunder.learner.accumulators.layout import Flats, GradientLayout
from megathunder.learner.accumulators.shards import Shards
from megathunder.types import Fold


class AccumulatorStore:
    """See the module docstring. `on_host` keeps all but the batch in host memory (pinned where CUDA is present)."""

    def __init__(
        self,
        layout: GradientLayout,
        arithmetic: FloatArithmetic | FixedPointArithmetic,
        *,
        on_host: bool = False,
        shards: Shards | None = None,
    ) -> None:
        self.layout, self.arithmetic, self._shards = layout, arithmetic, shards
        self._place = torch.device("cpu") if on_host else None
        home = Accumulator(layout.homes, layout.home_views, [0] * len(layout.homes))
        self._home = home
        self.batch = arithmetic.allocate() if arithmetic.exact else home
        self._batch_part = self.batch
        if shards:
            self._batch_part = Accumulator(shards.parts(self.batch.flats), [], [0] * len(layout.homes))
        self._open: dict[AccumulatorKey, Accumulator] = {BATCH: self.batch}
        self._pool: list[Accumulator] = []
        self._traffic: HostTraffic | None = getattr(arithmetic, "traffic", None)
        self._scratches: list[Accumulator] = [home] if arithmetic.exact else []
        self._emptied: dict[int, torch.cuda.Event] = {}  # of a scratch, by its identity
        self._through_scratch = arithmetic.exact or on_host or shards is not None
        self.peak_bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes allocated beyond Megatron's own gradient buffer, the pool and the scratch included."""
        extra = [*self._open.values(), *self._pool, *self._scratches]
        return sum(_bytes(a) for a in extra if a is not self._home)

    @property
    def batch_bounds(self) -> list[int]:
        """Bound of the batch's largest integer in each bucket (exact only), what was folded in parts counted by one of
        the ranks that share them."""
        if self._shards is None:
            return self.batch.bounds
        folded = [b if self._shards.counts(bucket) else 0 for bucket, b in enumerate(self._batch_part.bounds)]
        return [direct + part for direct, part in zip(self.batch.bounds, folded, strict=True)]

    @property
    def open_keys(self) -> frozenset[AccumulatorKey]:
        """Keys that hold a gradient, the batch's excepted."""
        return frozenset(self._open) - {BATCH}

    @contextlib.contextmanager
    def collect(
        self, key: AccumulatorKey, *, features: Sequence[float] = (), coefficient: float = 1.0
    ) -> Iterator[None]:
        """Backward passes of the body add to `key`: coefficient * gradient for the batch in exact mode (elsewhere the
        coefficient is in the loss), features[k] * gradient to moment k."""
        if key.kind is AccumulatorKind.MOMENT and self.arithmetic.exact:
            raise UserError(
                f"{key} under accumulator = exact",
                expected="class accumulators: r and A(r) would be rounded apart, so moments are not order-free",
                remedy="keep one class accumulator for each distinct reward, or use accumulator = fp32",
            )
        direct = not self._through_scratch or (key == BATCH and not self.arithmetic.exact)
        if direct and key.kind is not AccumulatorKind.MOMENT:
            self.layout.point(self.of(key).views)
            yield
            return
        scratch = self._zeroed_scratch()
        self.layout.point(scratch.views)
        yield
        if key == BATCH:
            self.arithmetic.deposit(self.batch, scratch.flats, coefficient)
        else:
            self._add(key, scratch, features)
        if self._traffic:
            self._emptied[id(scratch)] = self._traffic.asked()
        self.layout.point_home()

    def of(self, key: AccumulatorKey) -> Accumulator:
        """The accumulator of `key`, zeroed and opened on first use."""
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = self._take()
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return found

    def read(self, keys: Sequence[AccumulatorKey]) -> list[Flats]:
        """What was added to each of `keys`, in units of `unit`, once everything on its way has arrived."""
        if self._traffic:
            self._traffic.asked().synchronize()
        zeros = [torch.zeros_like(home) for home in self.layout.homes] if any(self.of(k).fresh for k in keys) else []
        return [zeros if self.of(key).fresh else self.of(key).flats for key in keys]

    @property
    def unit(self) -> float:
        """Value of a 1 in an open accumulator."""
        return 2.0**-self.arithmetic.fraction_bits if self.arithmetic.exact else 1.0

    def fold(self, fold: Fold) -> None:
        """target += coefficient * source for every term in order, then free. Raises where a source does not exist."""
        for term in fold.terms:
            if term.source not in self._open:
                raise MegathunderError(
                    f"fold of {term.source}: this cell holds {sorted(self.open_keys)}; nothing was added to that key "
                    "here, or it was freed"
                )
            if self._becomes(term, fold):
                self._open[term.target] = self._open.pop(term.source)
                continue
            source = self._open[term.source]
            batch = term.target == BATCH
            target = self._batch_part if batch else self.of(term.target)
            self.arithmetic.combine(target, source, term.coefficient, batch=batch)
        for key in fold.free:
            freed = self._open.pop(key, None)
            if freed is not None:
                self._pool.append(freed)

    def _becomes(self, term: FoldTerm, fold: Fold) -> bool:
        """Whether a source that is freed, and goes nowhere else, can be the target that does not exist yet."""
        once = sum(other.source == term.source for other in fold.terms) == 1 and term.source in fold.free
        return once and term.coefficient == 1.0 and term.target not in self._open

    def clear(self) -> None:
        """Zero the batch; every group must be closed by now."""
        self.layout.point_home()
        self.arithmetic.zero(self.batch)
        if self._shards:
            self._batch_part.bounds = [0] * len(self.layout.homes)
        for home in self.layout.homes:
            home.zero_()

    def abandon(self) -> None:
        """Drop every open accumulator and clear the batch (an update that is given up)."""
        for key in self.open_keys:
            self._pool.append(self._open.pop(key))
        self.clear()

    def _add(self, key: AccumulatorKey, scratch: Accumulator, features: Sequence[float]) -> None:
        """The scratch's gradient into an accumulator of an open group."""
        if self._shards and self.arithmetic.exact:
            self.arithmetic.deposit_part(self.of(key), scratch.flats, self._shards)
            return
        gradient = self._shards.reduce(scratch.flats) if self._shards else scratch.flats
        if key.kind is AccumulatorKind.MOMENT:
            for slot, feature in enumerate(features):
                self.arithmetic.deposit(self.of(key._replace(slot=slot)), gradient, feature)
        else:
            self.arithmetic.deposit(self.of(key), gradient, None if self.arithmetic.exact else 1.0)

    def _take(self) -> Accumulator:
        if self._pool:
            reused = self._pool.pop()
            self.arithmetic.zero(reused)
            return reused
        return self.arithmetic.allocate(self._place, self._shards)

    def _zeroed_scratch(self) -> Accumulator:
        if len(self._scratches) < (2 if self._traffic else 1):
            self._scratches.append(FloatArithmetic(self.layout).allocate())
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        scratch = self._scratches.pop(0)
        self._scratches.append(scratch)
        if id(scratch) in self._emptied:
            self._traffic.wait(self._emptied.pop(id(scratch)))
        for flat in scratch.flats:
            flat.zero_()
        return scratch


def _bytes(accumulator: Accumulator) -> int:
    return sum(flat.numel() * flat.element_size() for flat in accumulator.flats)
