"""Steps of two trainers in turn: each waits before a step until the other one has ended its own.

    gate file     how many steps may begin        written by `trl_grpo.py`, read by both sides
    steps file    one JSON line per ended step    written by a side, read by `trl_grpo.py`

Imported in both environments, so it needs nothing but Python.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

POLL_S = 0.005


def open_gate(file: Path, steps: int) -> None:
    """Let the first `steps` steps begin."""
    partial = file.with_suffix(".part")
    partial.write_text(str(steps))
    os.replace(partial, file)


def is_open(file: Path, step: int) -> bool:
    """Whether step `step`, counted from 0, may begin."""
    return file.is_file() and int(file.read_text()) > step


def wait_for_gate(file: Path, step: int) -> None:
    """Sleep until it is open."""
    while not is_open(file, step):
        time.sleep(POLL_S)


def append_step(file: Path, step: dict[str, object]) -> None:
    """One ended step."""
    with file.open("a") as out:
        out.write(json.dumps(step) + "\n")


def read_steps(file: Path) -> list[dict]:
    """The ended steps; a line that is being written does not count."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
