"""What an update had done when the run ended in the middle of it: a line of `unfinished_updates.jsonl`.

`metrics.jsonl` has finished updates alone, so that its rows add up; an update that failed is looked for here. Written
by the coordinator, whatever ended the run.
"""

from __future__ import annotations

import time
from collections import Counter

import msgspec

from megathunder.coordinator.rollouts import Rollouts


class UnfinishedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` is the error, or how the run was told to end; rewards are of the trajectories that had one."""

    update: int
    policy_version: int
    phase: str
    reason: str
    elapsed_s: float
    trajectories_expected: int
    trajectories_completed: int
    trajectories_rewarded: int
    trajectories_lost: dict[str, int]
    sampled_tokens: int
    reward_mean: float | None


def unfinished(rollouts: Rollouts, *, phase: str, reason: str) -> UnfinishedUpdate:
    """The line of an update that ends now."""
    trajectories = list(rollouts.trajectories.values())
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return UnfinishedUpdate(
        update=rollouts.update,
        policy_version=rollouts.policy_version,
        phase=phase,
        reason=reason,
        elapsed_s=time.monotonic() - rollouts.started_s,
        trajectories_expected=rollouts.expected,
        trajectories_completed=len(trajectories),
        trajectories_rewarded=len(rewards),
        trajectories_lost=dict(Counter(rollouts.lost.values())),
        sampled_tokens=sum(t.sampled_tokens for t in trajectories),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
    )
