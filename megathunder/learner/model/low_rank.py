"""Low-rank factors merged into the weights they sit on: the same bits in any order of addition, shard or device.

    row i of B       integers q_i times 2^(e_i)             e_i from the row's largest element, q rounded to `bits` bits
    column j of A    integers p_j times 2^(f_j)             likewise
    product          (sum_k q_ik p_kj) 2^(e_i + f_j)        exact in float64: r 2^(2 bits) <= 2^53 for r factors
    merged           round(W + scale * product)             one rounding to float32, one to the type of the learner

A rank's rows or columns, or one expert, give the bits they have in the whole, whatever multiplies the matrices. The
error is within an ulp of float32 of the magnitudes that are summed. Called by `lora.py` and by publish/ on both sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

EXACT_BITS = 53  # integers up to 2^53 are exact in float64
CHUNK = 1 << 17  # elements of a chunk of rows, which stays in a core's cache
DEVICE_CHUNK = 1 << 24


def product(b: Tensor, a: Tensor, scale: float) -> Tensor:
    """scale * b @ a for b [out, r], a [r, in]: [out, in] float32, float64 where the factors are."""
    bits = (EXACT_BITS - (a.shape[0] - 1).bit_length()) // 2
    rows, columns = _rounded(b, 1, bits), _rounded(a, 0, bits)
    found = torch.empty(b.shape[0], a.shape[1], device=a.device, dtype=torch.promote_types(a.dtype, torch.float32))
    height = max(1, (CHUNK if a.device.type == "cpu" else DEVICE_CHUNK) // max(1, a.shape[1]))
    for top in range(0, b.shape[0], height):
        found[top : top + height] = (rows[top : top + height] @ columns).mul_(scale)
    return found


def merge(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """`weight` [out, in] and its adapter in one matrix of the factors' type."""
    return (weight + product(b, a, scale)).to(a.dtype)


def _rounded(matrix: Tensor, dimension: int, bits: int) -> Tensor:
    """`matrix` in float64, rounded to integers of at most `bits` bits times one power of two along `dimension`."""
    wide = matrix.detach().double()
    exponents = wide.abs().amax(dimension, keepdim=True).frexp().exponent.long()
    units = ((exponents - bits + 1023) << 52).view(torch.float64)
    return (wide / units).round_().mul_(units)
