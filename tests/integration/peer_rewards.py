"""A reward for the rows of each peer: it reads the columns that the peer's own functions read."""

from __future__ import annotations

from typing import Any


def slime(completion: str, row: dict[str, Any], trajectory: Any) -> float:
    """The label, and the metadata."""
    return (completion.strip() == row["label"]) + row["metadata"]["difficulty"] * len(completion) / 1000


def verl(completion: str, row: dict[str, Any], trajectory: Any) -> float:
    """compute_score(data_source, solution_str, ground_truth, extra_info) over verl's row."""
    assert row["data_source"] == "openai/gsm8k" and row["extra_info"]["split"] == "train"
    return (completion.strip() == row["reward_model"]["ground_truth"]) + len(completion) / 1000


def trl(completions: list[str], rows: list[dict[str, Any]], trajectories: list[Any]) -> list[float]:
    """A batch, as TRL's functions take it."""
    solutions = [row["solution"] for row in rows]
    return [(c.strip() == s) + len(c) / 1000 for c, s in zip(completions, solutions, strict=True)]
