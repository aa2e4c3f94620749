"""Tensors as unsigned words: the bits of their elements, which are what is compared, sent and checked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megathunder.errors import UserError

SIGNED = {2: torch.int16, 4: torch.int32}
STAYS_FLOAT32 = "e_score_correction_bias"  # the router's bias, in engines as in checkpoints
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_name(tensor: Tensor) -> str:
    """torch's name of its type without the prefix. Raises UserError for types that are not published."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in FLOATS:
        raise UserError(
            f"weights of type {name}",
            expected=f"one of {', '.join(FLOATS)}",
            remedy="set rollout.dtype to one of these: what is published has the type the servers compute in",
        )
    return name


def published_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type in which servers that compute in `dtype` hold tensor `name`; None: the one it has."""
    return None if name.endswith(STAYS_FLOAT32) else dtype


def uint_dtype(dtype: str) -> np.dtype:
    """The unsigned word with the size of one element."""
    return np.dtype(f"u{FLOATS[dtype].itemsize}")


def as_uint(tensor: Tensor) -> np.ndarray:
    """[N] unsigned words of a tensor, on the host; shares memory with a contiguous host tensor."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(SIGNED[flat.element_size()]).numpy().view(f"u{flat.element_size()}")
