"""Bounded output equals what cutting the whole of it gives, however it arrives."""

from __future__ import annotations

import random

from megathunder.sandbox.output import Kept, joined


def whole(data: bytes, most: int) -> tuple[str, int]:
    """The same from all bytes at once."""
    half = most >> 1
    if len(data) <= 2 * half:
        return data.decode(errors="replace"), 0
    dropped = len(data) - 2 * half
    return joined(data[:half] + data[-half:], half, dropped), dropped


def test_what_is_kept_of_chunks_is_what_is_kept_of_the_whole() -> None:
    rng = random.Random(0)
    text = "caf\u00e9 \u20ac \U0001f600 \n".encode() + b"\xf0\xff"
    for _ in range(400):
        data = (text * rng.randrange(1, 40))[: rng.randrange(500)]
        most, at = rng.randrange(2, 200), 0
        kept = Kept(most)
        while at < len(data):
            size = rng.randrange(1, 90)
            kept.feed(data[at : at + size])
            at += size
        assert (kept.text, kept.dropped_bytes) == whole(data, most)
