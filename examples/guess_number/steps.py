"""Guess the number, as a class with reset and step: the policy's words are the action."""

from __future__ import annotations

import re
from typing import Any


class GuessNumber:
    """One game. `row` is the line of games.jsonl: {"number": 7}."""

    def reset(self, row: dict[str, Any]) -> str:
        """The first thing that the policy is told."""
        self.number = row["number"]
        return "guess the number in 1 to 99"

    def step(self, action: str) -> tuple[str, float, bool]:
        """What the policy is told next, the reward of this step, and whether the game is over."""
        numbers = re.findall(r"\d+", action)
        if not numbers:
            return "say a number", 0.0, False
        guess = int(numbers[-1])
        if guess == self.number:
            return "right", 1.0, True
        closer = max(0.0, 0.1 - abs(guess - self.number) / 1000)
        return ("higher" if guess < self.number else "lower"), closer, False
