"""Files of one JSON object a line, read back: `metrics.jsonl`, `events.jsonl` and trajectories.

A last line without its newline was cut off by a crash: it is left out, with a warning. Any other line that is no JSON
object is a UserError that names file and line. Called by `row.py`, `spans.py`, `trajectories.py` and `folder.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megathunder.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")


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


def garbled(path: Path, number: int, line: bytes, reason: object) -> UserError:
    """What is wrong with line `number`."""
    return UserError(
        f"{path}, line {number}: {reason} in {line[:60]!r}",
        expected="one whole JSON object a line, as the run wrote it",
        remedy=f"restore the file, or delete that line: sed -i {number}d {path}",
    )
