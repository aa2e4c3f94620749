"""The reward of both trainers: whether a completion has an even number of characters. Half of the attempts earn it."""

from __future__ import annotations


def score(completion: str, row: dict, trajectory: object) -> float:
    """Ours."""
    return float(len(completion) % 2 == 0)


def trl_score(completions: list, **columns: object) -> list[float]:
    """TRL's: conversations, of which the last message counts."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(len(text) % 2 == 0) for text in texts]
