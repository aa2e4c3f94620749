"""Files into a container as a tar archive over a command's standard input, and a command's output out of it.

The daemon multiplexes output into frames (one byte of stream, three of padding, four of length). Called by
sandbox.docker, in threads.
"""

from __future__ import annotations

import io
import socket
import tarfile
from collections.abc import Callable, Iterable
from typing import Protocol

from docker.utils.socket import frames_iter

from megathunder.tasks import TaskFile


class Raw(Protocol):
    """What `exec_start(socket=True)` gives: a raw socket, or one wrapped for reading."""

    def close(self) -> None: ...


def archive_of(files: Iterable[TaskFile]) -> bytes:
    """Regular files, relative paths below /work; content that came as surrogates becomes the bytes it was."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for file in files:
            content = file.content.encode(errors="surrogateescape")
            path = file.path if file.path.startswith("/") else f"/work/{file.path}"
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(content), file.mode
            archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def send(raw: Raw, data: bytes) -> None:
    """All of a command's standard input."""
    connection: socket.socket = getattr(raw, "_sock", raw)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def read_output(raw: Raw, take: Callable[[bytes], None]) -> None:
    """Hands over output, both streams in the order written, until the command's last writer has closed."""
    try:
        for _, data in frames_iter(raw, tty=False):
            take(data)
    finally:
        raw.close()
