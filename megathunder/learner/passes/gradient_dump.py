"""Keeps an update's gradient (reduced and normalised, before the clip) or weights for a later comparison.

Called by `Learner.take_step` where a run records them. One file from rank 0, which holds its own shard: with tensor or
pipeline parallelism that is a part of the model, enough to compare two schedules of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def record_tensors(file: Path, names: Sequence[str], tensors: Sequence[Tensor], *, divisor: float = 1.0) -> None:
    """Write {Megatron name: tensor / divisor} in the tensors' own type; the folder is made. A divisor of 0 is that of
    an update in which nothing survived: its gradient is 0, not 0 / 0."""
    file.parent.mkdir(parents=True, exist_ok=True)
    divisor = divisor or 1.0
    save_file({name: (tensor / divisor).contiguous() for name, tensor in zip(names, tensors, strict=True)}, file)
