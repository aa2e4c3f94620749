"""Keeps an update's gradient for a later comparison: reduced and normalised, before the clip.

Called by `Learner.take_step` where a run records gradients. One file from rank 0, which holds its own shard: with
tensor or pipeline parallelism that is a part of the model, enough to compare two schedules of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def record_gradient(file: Path, names: Sequence[str], views: Sequence[Tensor], normaliser: float) -> None:
    """Write {Megatron name: gradient / normaliser} in the accumulator's type; the folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: (view / normaliser).contiguous() for name, view in zip(names, views, strict=True)}, file)
