"""Guess the number, as a class whose public methods are tools that the policy calls."""

from __future__ import annotations

from typing import Any


class GuessNumber:
    """One game. `reward` is what the trajectory is worth; the episode is over when `done` is true, or when the policy
    calls no tool."""

    def reset(self, row: dict[str, Any]) -> str:
        """The first thing that the policy is told."""
        self.number, self.reward, self.done = row["number"], 0.0, False
        return "Find the number between 1 and 99."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number to guess, from 1 to 99.

        Returns:
            "right", "higher" or "lower".
        """
        if number == self.number:
            self.reward, self.done = 1.0, True
            return "right"
        return "higher" if number < self.number else "lower"
