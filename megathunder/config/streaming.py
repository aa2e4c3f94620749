"""What is released to the learner, and how much may be open at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import PositiveFloat, PositiveInt

ReleaseName = Literal["trajectory", "turn", "turn_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingConfig:
    """[streaming] release, packing and admission of learner work."""

    release: ReleaseName = "trajectory"
    """What is released: whole trajectories, turns (OPD), or turns' forward passes with one reverse pass at the end."""
    content_ready: bool = False
    """GRPO: differentiate a completed trajectory before its reward is known, into an accumulator of its own."""
    pack_tokens: PositiveInt = 2048
    """Tokens of one micro-batch."""
    pack_rows: PositiveInt = 64
    """Rows of one micro-batch."""
    max_open_groups: PositiveInt = 16
    """Groups with unknown coefficients a cell may hold accumulators for."""
    reward_values: PositiveInt = 2
    """Distinct rewards of an open group that get an accumulator each (a binary verifier has two); more share two
    moments."""
    max_per_trajectory_accumulators: PositiveInt = 16
    """Trajectories a cell may hold an accumulator for while their reward is unknown (`content_ready`)."""
    on_lost: Literal["shrink", "drop_group", "fail"] = "shrink"
    """A lost trajectory: statistics over the survivors, drop its group, or stop the run."""
    look_ahead: bool = True
    """Send a busy cell its next piece of work while others wait, so that it does not wait for the coordinator."""
    stall_timeout_s: PositiveFloat = 600.0
    """An update that makes no progress for this long ends the run with an error. Raised to what `rollout.deadline_s`,
    `rollout.max_retries`, `sandbox.grading_budget_s` and `reward.timeout_s` allow one trajectory to take."""
