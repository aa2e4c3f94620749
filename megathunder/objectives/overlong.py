"""The overlong penalty: a length penalty that depends on one trajectory alone, so advantages stay affine."""

from __future__ import annotations


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Linear length penalty of DAPO: 0 up to `limit - buffer` tokens, -1 at `limit`; it depends on this
    trajectory alone, so the advantage stays affine."""
    if buffer <= 0:
        return 0.0
    return -min(max(tokens - (limit - buffer), 0) / buffer, 1.0)
