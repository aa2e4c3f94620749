"""Bounded output: a head and a tail of what a command wrote, and exactly how much is missing between them.

    kept = 2 x half bytes at most;   head = the first half,  tail = the last half,  dropped = written - head - tail

Text is decoded when all bytes are there, head and tail apart, so that no character is torn by a read; only one that the
cut itself tears becomes U+FFFD. The supervisor of a bubblewrap sandbox keeps output in the same way on its side.
Called by sandbox.local and sandbox.docker.
"""

from __future__ import annotations


class Kept:
    """Bytes as they come, at most `most` of them kept."""

    def __init__(self, most: int) -> None:
        self._half = most >> 1
        self._head, self._tail, self._written = bytearray(), bytearray(), 0

    def feed(self, data: bytes) -> None:
        """Some more output."""
        self._written += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:  # cut now and then: not for every chunk of a flood
            del self._tail[: len(self._tail) - self._half]

    @property
    def dropped_bytes(self) -> int:
        return self._written - len(self._head) - min(len(self._tail), self._half)

    @property
    def text(self) -> str:
        tail = self._tail[max(0, len(self._tail) - self._half) :]
        return joined(bytes(self._head + tail), len(self._head), self.dropped_bytes)


def joined(output: bytes, head: int, dropped: int) -> str:
    """Head and tail as text, with a line between them that says how much is missing."""
    if not dropped:
        return output.decode(errors="replace")
    first, last = output[:head].decode(errors="replace"), output[head:].decode(errors="replace")
    return f"{first}\n... {dropped} bytes dropped ...\n{last}"
