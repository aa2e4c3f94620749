"""Files of one JSON object a line, read back: `metrics.jsonl` and `events.jsonl`.

A last line without its newline was cut off by a crash: it is left out, with a warning. Any other line that is no JSON
object is a UserError that names file and line. Called by `row.py`, `spans.py` and `folder.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megathunder.errors import UserError

log = logging.getLogger(__name__)


def json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of `path` as written and decoded; nothing of a file that does not exist."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if not line.endswith(b"\n"):
                log.warning("%s: line %d is cut off and left out", path, number)
                return
            yield line, _decode(path, number, line)


def garbled(path: Path, number: int, line: bytes, reason: object) -> UserError:
    """What is wrong with line `number`."""
    return UserError(
        f"{path}, line {number}: {reason} in {line[:60]!r}",
        expected="one whole JSON object a line, as the run wrote it",
        remedy=f"restore the file, or delete that line: sed -i {number}d {path}",
    )


def _decode(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise garbled(path, number, line, error) from None
