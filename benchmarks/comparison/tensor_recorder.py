"""Keeps an update's gradient (reduced and normalised, before the clip) or weights for a later comparison.

One file from rank 0, which holds its own shard: with tensor or pipeline parallelism that is a part of the model, enough
to compare two schedules of one layout. Called by the learner where a measurement asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from benchmarks.comparison.alternation import tensor_file


class TensorRecorder:
    """The `StepObserver` of an alternation that keeps tensors of the kinds `keep`."""

    def __init__(self, run: Path, keep: Sequence[str]) -> None:
        self._run, self._keep = run, keep

    def gradient_reduced(self, update: int, names: Sequence[str], tensors: Sequence[Tensor], normaliser: float) -> None:
        if "gradients" in self._keep:
            record_tensors(tensor_file(self._run, "gradients", update), names, tensors, divisor=normaliser)

    def weights_stepped(self, update: int, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        if "weights" in self._keep:
            record_tensors(tensor_file(self._run, "weights", update), names, tensors)


def record_tensors(file: Path, names: Sequence[str], tensors: Sequence[Tensor], *, divisor: float = 1.0) -> None:
    """Write {Megatron name: tensor / divisor} in the tensors' own type; the folder is made. A divisor of 0 is that of
    an update in which nothing survived: its gradient is 0, not 0 / 0."""
    file.parent.mkdir(parents=True, exist_ok=True)
    divisor = divisor or 1.0
    save_file({name: (tensor / divisor).contiguous() for name, tensor in zip(names, tensors, strict=True)}, file)
