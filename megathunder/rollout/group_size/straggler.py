"""The straggler event of a group: its longest trajectory is more than tau times its median one.

    S = [max_i l_i > tau * median_i l_i]       median of an even number: the mean of the two in the middle

Written as a product, so that a median of 0 needs no case of its own. Lost trajectories have no length; a group of
which fewer than two are left says nothing. Called by the coordinator and the simulator.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megathunder.config.sagc import LengthName
from megathunder.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What one finished group says about stragglers. `size` is what was asked for, `prompt` names what it shares with
    other groups (`sagc.prompt_prior`; empty: nothing)."""

    size: int
    straggled: bool
    prompt: str = ""


def length_of(trajectory: Trajectory, measure: LengthName) -> float:
    """Length in sampled tokens, turns, or seconds from start to completion."""
    if measure == "tokens":
        return float(trajectory.sampled_tokens)
    if measure == "turns":
        return float(trajectory.turns)
    return trajectory.completed_s - trajectory.started_s


def straggles(lengths: Sequence[float], threshold: float) -> bool:
    """Whether the longest exceeds `threshold` times the median."""
    return max(lengths) > threshold * statistics.median(lengths)


def outcome(size: int, lengths: Sequence[float], threshold: float, prompt: str = "") -> GroupOutcome | None:
    """The outcome of a group of `size` whose survivors have these lengths; None of fewer than two."""
    if len(lengths) < 2:
        return None
    return GroupOutcome(size=size, straggled=straggles(lengths, threshold), prompt=prompt)
