"""What a reward function sees of a trajectory, and what it gives back.

    def score(completion: str, row: dict, trajectory: FinishedEpisode) -> float | dict[str, float]
    def score(completions: list[str], rows: list[dict], trajectories: list[FinishedEpisode]) -> list

Called by rollout/ (which makes them) and by the functions of [reward].
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

TOTAL = "reward"  # the part of a dict that is the sum, where it says it


class FinishedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory as texts. `completion` is what was sampled last; `answer` what was submitted (None: nothing);
    `messages` the conversation ({"role", "content"}); `environment_reward` what the environment or the agent gave."""

    task_id: str
    kind: str
    prompt: str
    completion: str
    answer: str | None
    messages: tuple[dict[str, str], ...]
    turns: int
    end_reason: str
    sampled_tokens: int
    environment_reward: float | None = None

    @property
    def truncated(self) -> bool:
        """Whether the last turn was cut off at a limit."""
        return self.end_reason in ("malformed", "max_tokens")


class Score(NamedTuple):
    """A finite reward and its named parts."""

    reward: float
    parts: dict[str, float]


class NotAScore(ValueError):
    """A reward function gave something that is no finite number."""


def score_of(given: Any) -> Score:
    """What a function gave: a number, or a dict of parts whose `reward` (without one: whose sum) counts. Raises
    NotAScore."""
    if isinstance(given, dict):
        parts = {str(name): number(value, f"its part {name!r} is ") for name, value in given.items()}
        if not parts:
            raise NotAScore("it gave an empty dict")
        return Score(parts[TOTAL] if TOTAL in parts else total(parts.values()), parts)
    return Score(number(given, "it gave "), {})


def number(given: Any, before: str) -> float:
    """`given` as a finite float; arrays and tensors of one element are numbers, and so are decimals."""
    try:
        value = given.item() if hasattr(given, "item") and not isinstance(given, numbers.Real) else given
        found = float(value) if isinstance(value, numbers.Real | Decimal) else math.nan
    except (OverflowError, ValueError, RuntimeError):  # no float holds it; an array or a tensor of several elements
        found = math.nan
    if not math.isfinite(found):
        raise NotAScore(f"{before}{given!r:.80}")
    return found


def total(rewards: Iterable[float]) -> float:
    """Their sum, exactly rounded. Raises NotAScore where it is no finite number."""
    values = [*rewards]
    try:
        return number(math.fsum(values), f"the sum of {values} is ")
    except OverflowError:
        raise NotAScore(f"the sum of {values} is beyond what a float holds") from None
