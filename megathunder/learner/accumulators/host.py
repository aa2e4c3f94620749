"""Accumulators in pinned host memory, added to on the GPU a piece at a time while the next backward pass computes.

    backward -> scratch A (device)        backward -> scratch B (device)        ...
                  up:    host piece -> buffer, buffer += alpha scratch piece
                  down:  buffer -> host piece                     (while the next piece is on its way up)

Three buffers of a piece each circulate between two copy streams, so both directions of the bus are in use and the
device holds no accumulator. A fresh accumulator is written without being read. Events keep the order: `up` waits for
what computed the scratch and for the last `down`; whoever reuses a scratch or reads the batch waits for what was asked
before. `exposed_s` is the time computation stood waiting there.
Called by the store, on CUDA ranks with placement "host".
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megathunder.learner.accumulators.arithmetic import Accumulator, FloatArithmetic
from megathunder.learner.accumulators.layout import Flats, GradientLayout
from megathunder.learner.accumulators.shards import Shards

PIECE = 1 << 24  # elements: 64 MiB of float32
BUFFERS = 3


class HostTraffic:
    """The two copy streams and the buffers between them. `cuda` stands in for torch.cuda in tests."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, piece: int = PIECE, cuda: ModuleType = torch.cuda
    ) -> None:
        self._cuda, self._piece = cuda, piece
        self._up, self._down = cuda.Stream(), cuda.Stream()
        self._buffers = [torch.empty(piece, dtype=dtype, device=device) for _ in range(BUFFERS)]
        self._free = [cuda.Event(enable_timing=False) for _ in range(BUFFERS)]
        self._turn = 0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def add(self, host: Tensor, part: Tensor, alpha: float, *, fresh: bool) -> None:
        """host += alpha * part (device); `fresh`: host = alpha * part."""
        self._begin()
        for at in range(0, host.numel(), self._piece):
            piece, ours = host[at : at + self._piece], part[at : at + self._piece]
            with self._on_the_way(piece) as buffer:
                if fresh:
                    torch.mul(ours, alpha, out=buffer)
                else:
                    buffer.copy_(piece, non_blocking=True)
                    buffer.add_(ours, alpha=alpha)

    def combine(self, target: Tensor, source: Tensor, alpha: float, *, fresh: bool) -> None:
        """target += alpha * source, both on the host."""
        self._begin()
        for at in range(0, target.numel(), self._piece):
            piece = target[at : at + self._piece]
            with self._on_the_way(piece) as buffer:
                buffer.copy_(source[at : at + self._piece], non_blocking=True)
                buffer.mul_(alpha)
                if not fresh:
                    buffer.add_(piece.to(buffer.device, non_blocking=True))

    def collect(self, home: Tensor, host: Tensor, alpha: float) -> None:
        """home (device) += alpha * host."""
        self._begin()
        for at in range(0, home.numel(), self._piece):
            piece = host[at : at + self._piece]
            buffer, number = self._next(piece.numel())
            with self._cuda.stream(self._up):
                buffer.copy_(piece, non_blocking=True)
                home[at : at + self._piece].add_(buffer, alpha=alpha)
                self._free[number].record(self._up)

    def asked(self) -> torch.cuda.Event:
        """An event behind everything asked for until now."""
        self._down.wait_stream(self._up)
        event = self._cuda.Event(enable_timing=False)
        event.record(self._down)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Computation goes on after `event`; the time it stands still counts as exposed."""
        stream = self._cuda.current_stream()
        before, after = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._waits.append((before, after))

    def exposed_s(self) -> float:
        """Seconds computation stood waiting since this was last asked; waits for the device."""
        self._cuda.synchronize()
        waits, self._waits = self._waits, []
        return sum(before.elapsed_time(after) for before, after in waits) / 1000

    def _begin(self) -> None:
        self._up.wait_stream(self._cuda.current_stream())
        self._up.wait_stream(self._down)

    def _next(self, elements: int) -> tuple[Tensor, int]:
        """The next buffer, once its last piece has gone."""
        number = self._turn = (self._turn + 1) % BUFFERS
        self._up.wait_event(self._free[number])
        return self._buffers[number][:elements], number

    def _on_the_way(self, piece: Tensor) -> _Passage:
        buffer, number = self._next(piece.numel())
        return _Passage(self._cuda, self._up, self._down, self._free[number], buffer, piece)


class _Passage:
    """`with` it, a buffer is filled on the upward stream; then it travels down into `piece` and is free again."""

    def __init__(
        self,
        cuda: ModuleType,
        up: torch.cuda.Stream,
        down: torch.cuda.Stream,
        free: torch.cuda.Event,
        buffer: Tensor,
        piece: Tensor,
    ) -> None:
        self._cuda, self._up, self._down, self._free = cuda, up, down, free
        self._buffer, self._piece = buffer, piece
        self._filling = cuda.stream(up)

    def __enter__(self) -> Tensor:
        self._filling.__enter__()
        return self._buffer

    def __exit__(self, *failure: object) -> None:
        self._filling.__exit__(*failure)
        self._down.wait_stream(self._up)
        with self._cuda.stream(self._down):
            self._piece.copy_(self._buffer, non_blocking=True)
            self._free.record(self._down)


class HostArithmetic(FloatArithmetic):
    """Floating-point sums whose accumulators lie in host memory and whose additions happen on the device."""

    def __init__(self, layout: GradientLayout, traffic: HostTraffic) -> None:
        super().__init__(layout)
        self.traffic = traffic

    def allocate(self, device: torch.device | None = None, shards: Shards | None = None) -> Accumulator:
        if device is None:
            return super().allocate(shards=shards)
        homes = shards.parts(self._layout.homes) if shards else self._layout.homes
        flats = [_pinned(home.numel(), home.dtype, lock=home.is_cuda) for home in homes]
        return Accumulator(flats, [] if shards else self._layout.views(flats), fresh=True)

    def zero(self, accumulator: Accumulator) -> None:
        """What lies on the host is overwritten by the next addition, which may come while this is still being read."""
        if accumulator.flats[0].device == self._layout.homes[0].device:
            super().zero(accumulator)
        else:
            accumulator.fresh = True

    def deposit(self, target: Accumulator, gradient: Flats, coefficient: float) -> None:
        for into, part in zip(target.flats, gradient, strict=True):
            self.traffic.add(into, part, coefficient, fresh=target.fresh)
        target.fresh = False

    def combine(self, target: Accumulator, source: Accumulator, coefficient: float, *, batch: bool) -> None:
        if source.fresh:
            return
        for into, part in zip(target.flats, source.flats, strict=True):
            if batch:
                self.traffic.collect(into, part, coefficient)
            else:
                self.traffic.combine(into, part, coefficient, fresh=target.fresh)
        target.fresh = target.fresh and batch
        if batch:
            self.traffic.wait(self.traffic.asked())


def _pinned(elements: int, dtype: torch.dtype, *, lock: bool) -> Tensor:
    """Host memory that the bus can reach by itself. torch's own allocator would round its size up to a power of two."""
    flat = torch.empty(elements, dtype=dtype)
    if lock:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.nbytes, 0))
    return flat
