"""At which updates a run was resumed, and which settings had changed: `resumptions.jsonl`, one line a resumption.

Updates before it were made under the settings of the left side, later ones under those of the right. Written by the
coordinator, read by the report.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megathunder.jsonl import decoded_lines
from megathunder.metrics.run_folder import write_atomically


class ResumedAt(msgspec.Struct, frozen=True, kw_only=True):
    """`update` is the first one after it; `changed` are settings that differ from then on: "name: old -> new"."""

    update: int
    changed: tuple[str, ...] = ()


def note_resumption(path: Path, resumed: ResumedAt) -> None:
    """Add a line. Resumptions at this update or later are forgotten, as are the updates that followed them."""
    kept = [one for one in read_resumptions(path) if one.update < resumed.update]
    write_atomically(path, b"".join(msgspec.json.encode(one) + b"\n" for one in [*kept, resumed]))


def read_resumptions(path: Path) -> tuple[ResumedAt, ...]:
    """All of a run, in order; none of one that was never resumed. UserError for a damaged line."""
    return tuple(resumed for _, resumed in decoded_lines(path, msgspec.json.Decoder(ResumedAt)))
