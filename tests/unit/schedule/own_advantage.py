"""An advantage as a user would bring it: an arbitrary table over the rewards of a group."""

from __future__ import annotations

import math


def hashed(rewards: list[float]) -> list[float]:
    """A pseudo-random number for every distinct reward, another one in every group."""
    group = math.fsum(rewards) + 0.1 * len(rewards)
    return [math.sin(57.3 * reward + 12.9 * group) for reward in rewards]
