"""An order-free checksum of weights that learner and engine each compute over their own layout.

    w_i     8-byte word i of a tensor, row by row (a row is padded with zeros to whole words)
    h(x)    x ^= x >> 31;  x *= A;  x ^= x >> 29;  x *= B;  x ^= x >> 32             modulo 2^64 (shifts keep the sign)
    sum     over all tensors and words of h(w_i + (i + 1) * G + s(name))             modulo 2^64

A sum has no order, so words that changed can be taken out and put in, and a piece of a tensor (an expert, a shard of
rows or of whole columns of words) contributes by itself; pieces may be summed anywhere. Shape and type enter through
s(name). It detects a wrong, swapped, missing or misplaced word with probability 1 - 2^-64; it is not a defence against
someone who chooses the weights.
Called by publish/ on both sides. Refuses a piece that does not start on a whole word.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 1 << 15  # a chunk and its temporary stay in a core's cache
DEVICE_CHUNK_WORDS = 1 << 24
MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def tensor_checksum(name: str, tensor: Tensor) -> int:
    """Checksum of the whole of `tensor`, in [0, 2^64)."""
    return piece_checksum(name, tuple(tensor.shape), tensor)


def piece_checksum(name: str, shape: tuple[int, ...], piece: Tensor, *, row: int = 0, column: int = 0) -> int:
    """Contribution of `piece`, which lies at `row` and `column` (elements) of tensor `name` of `shape`, both seen as
    [rows, last dimension]. Raises ValueError for columns that are not whole words."""
    width = shape[-1] if shape else 1
    flat = piece.detach().contiguous().view(-1, piece.shape[-1] if piece.dim() else 1)
    row_bytes, offset_bytes = width * piece.element_size(), column * piece.element_size()
    ends_inside = column + flat.shape[1] < width
    if offset_bytes % WORD_BYTES or (ends_inside and flat.shape[1] * piece.element_size() % WORD_BYTES):
        raise ValueError(f"columns {column} to {column + flat.shape[1]} of {name} are not whole 8-byte words")
    words_a_row = -(-row_bytes // WORD_BYTES)
    seed = _seed(name, shape, piece.dtype)
    words = _words(flat)  # [rows, words]
    start = row * words_a_row + offset_bytes // WORD_BYTES
    if words.shape[1] == words_a_row:
        words = words.view(1, -1)
    return _sum(words, words_a_row, _signed(seed + (start + 1) * GOLDEN))


def changed_checksum(name: str, shape: tuple[int, ...], old: Tensor, new: Tensor, positions: np.ndarray) -> int | None:
    """What takes the checksum of host tensor `old` to that of `new`, which differ at `positions` [n] (ascending) alone:
    n words are read instead of all. None for rows that are not whole words."""
    per_word = WORD_BYTES // old.element_size()
    if not shape or shape[-1] % per_word:
        return None
    index = positions // per_word
    index = index[np.diff(index, prepend=-1) != 0]
    keys = (index + 1) * np.int64(_signed(GOLDEN)) + np.int64(_signed(_seed(name, shape, old.dtype)))
    before, after = (tensor.view(-1).view(torch.uint8).numpy().view(np.int64)[index] for tensor in (old, new))
    return (int(_mixed(after + keys).sum()) - int(_mixed(before + keys).sum())) & MASK


def _mixed(x: np.ndarray) -> np.ndarray:
    """h of int64 words, in place."""
    for shift, factor in ((31, FIRST), (29, SECOND)):
        x ^= x >> shift
        x *= np.int64(_signed(factor))
    x ^= x >> 32
    return x


def _words(flat: Tensor) -> Tensor:
    octets = flat.view(torch.uint8)
    if octets.shape[1] % WORD_BYTES:
        octets = torch.nn.functional.pad(octets, (0, WORD_BYTES - octets.shape[1] % WORD_BYTES))
    if octets.storage_offset() % WORD_BYTES:
        octets = octets.clone()
    return octets.view(torch.int64)


def _sum(words: Tensor, stride: int, first_key: int) -> int:
    """Sum over `words` [rows, columns] of h(word + first_key + (row * stride + column) * GOLDEN), in [0, 2^64)."""
    rows, columns = words.shape
    limit = CHUNK_WORDS if words.device.type == "cpu" else DEVICE_CHUNK_WORDS
    high, wide = max(1, limit // max(columns, 1)), min(columns, limit)
    index = torch.arange(min(high, rows), device=words.device).mul_(stride)[:, None]
    index = index + torch.arange(wide, device=words.device)
    keys = index.mul_(_signed(GOLDEN))  # [high, wide]
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            part = words[top : top + high, left : left + wide]
            x = part + keys[: part.shape[0], : part.shape[1]]
            x.add_(_signed(first_key + (top * stride + left) * GOLDEN))
            x.bitwise_xor_(x >> 31).mul_(_signed(FIRST))
            x.bitwise_xor_(x >> 29).mul_(_signed(SECOND))
            x.bitwise_xor_(x >> 32)
            total += x.sum()
    return int(total) & MASK


def _seed(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    text = f"{name} {tuple(shape)} {dtype}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _signed(value: int) -> int:
    """The 64-bit two's complement of `value` modulo 2^64."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value
