"""Adds a decoded change to a tensor in place, on its device: no dense copy of the tensor is made.

    flat[position_j] += change_j      modulo the word, or every element, or new bits where the change is absolute

A tensor may be a shard: rows from `row` and columns from `column` of the whole, seen as [rows, last dimension].
Called by the loader inside a server and for the sender's snapshot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megathunder.publish.delta.coding import Change


def apply_change(
    target: Tensor, change: Change, shape: tuple[int, ...] | None = None, *, row: int = 0, column: int = 0
) -> None:
    """`target` (contiguous, or two-dimensional) is the whole tensor, or its part at `row`, `column` of `shape`."""
    words = torch.from_numpy(change.words.view(f"i{change.words.itemsize}"))
    whole = shape is None or tuple(target.shape) == tuple(shape)
    signed = target.detach().view(words.dtype)
    if change.positions is None:
        words = words.view(target.shape) if whole else _window(words, target, shape, row, column)
        words = words.to(signed.device)
        signed.copy_(words) if change.absolute else signed.add_(words)
        return
    positions = torch.from_numpy(np.ascontiguousarray(change.positions))
    if not whole:
        positions, words = _inside(positions, words, target, shape, row, column)
    positions, words = positions.to(signed.device), words.to(signed.device)
    if signed.is_contiguous():
        signed.view(-1).scatter_add_(0, positions, words)
    else:  # a part of wider rows
        rows, columns = positions // target.shape[-1], positions % target.shape[-1]
        signed[rows, columns] = signed[rows, columns] + words


def _window(words: Tensor, target: Tensor, shape: tuple[int, ...], row: int, column: int) -> Tensor:
    height, width = target.numel() // target.shape[-1], target.shape[-1]
    whole = words.view(-1, shape[-1])
    return whole[row : row + height, column : column + width].reshape(target.shape)


def _inside(
    positions: Tensor, words: Tensor, target: Tensor, shape: tuple[int, ...], row: int, column: int
) -> tuple[Tensor, Tensor]:
    """Positions in the whole tensor that lie in the part, counted in the part, and their words."""
    height, width = target.numel() // target.shape[-1], target.shape[-1]
    rows = positions // shape[-1] - row
    columns = positions % shape[-1] - column
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return (rows * width + columns)[inside], words[inside]
