"""Files of one JSON object per line: `metrics.jsonl`, `events.jsonl`, trajectories, evaluations and attempts.

A last line without its newline was cut off by a crash: it is left out, with a warning. Any other line that is no JSON
object is a UserError that names file and line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megathunder.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")
BLOCK_BYTES = 2**16


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of `path` as written and decoded; nothing of a file that does not exist."""
    return decoded_lines(path, msgspec.json.Decoder(dict[str, Any]))


def decoded_lines(path: Path, decoder: msgspec.json.Decoder[T]) -> Iterator[tuple[bytes, T]]:
    """The same for lines of another type."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.endswith(b"\n"):
                log.warning("%s: line %d is cut off and left out", path, number)
                return
            try:
                value = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise garbled(path, number, line, error) from None
            yield line, value


def encode_lines(values: Iterable[object]) -> bytes:
    """One line per value."""
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def append_line(path: Path, value: object) -> None:
    """Add a line, in one write. What a crash left of a line at the end goes first: nothing begins in its middle."""
    with path.open("ab+") as file:
        file.truncate(whole_bytes(path))
        file.write(msgspec.json.encode(value) + b"\n")


def whole_bytes(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - BLOCK_BYTES)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
    return 0


def garbled(path: Path, number: int, line: bytes, reason: object) -> UserError:
    """What is wrong with line `number`."""
    return UserError(
        f"{path}, line {number}: {reason} in {line[:60]!r}",
        expected="one whole JSON object per line, as the run wrote it",
        remedy=f"restore the file, or delete that line: sed -i {number}d {path}",
    )
