"""What a shell command is worth: 1 if it is the right one, a little for one that is close and short."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any


def score(completion: str, row: dict[str, Any], trajectory: Any) -> dict[str, float]:
    """Parts of the reward; their sum counts. `row` is the line of train.jsonl."""
    said = completion.strip()
    close = SequenceMatcher(None, said, row["command"]).ratio()
    return {"right": float(said == row["command"]), "close": 0.1 * close}
