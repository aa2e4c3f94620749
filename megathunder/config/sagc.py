"""Group sizes that follow the stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat

LengthName = Literal["tokens", "turns", "seconds"]
PromptName = Literal["off", "kind", "task"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SagcConfig:
    """[sagc] straggler-aware group control, in force where `run.group_control` is "sagc"."""

    sizes: tuple[int, ...] = (4, 8, 16)
    """Ladder of group sizes, ascending; an update moves one rung at most."""
    target_rate: Annotated[float, Meta(gt=0, lt=1)] = 0.3
    """Long-run share of groups that may have a straggler (delta)."""
    threshold: Annotated[float, Meta(ge=1)] = 1.5
    """A group has a straggler if its longest trajectory exceeds this many times its median one (tau)."""
    length: LengthName = "tokens"
    """What a trajectory's length is: sampled tokens, turns, or seconds from its start to its completion."""
    dual_step: PositiveFloat = 0.1
    """Step of the multiplier a group (eta)."""
    dual_limit: NonNegativeFloat = 100.0
    """Largest multiplier: where even the smallest group straggles too often it would grow for ever."""
    forgetting: Annotated[float, Meta(gt=0, le=1)] = 0.95
    """Factor an update on what past groups have taught; 1: nothing is forgotten."""
    prior_straggled: PositiveFloat = 1.0
    """Pseudo-count of groups with a straggler that every size begins with (alpha)."""
    prior_steady: PositiveFloat = 1.0
    """Pseudo-count of groups without (beta)."""
    trajectories_per_update: NonNegativeInt = 0
    """Prompts follow the size so that an update has about this many trajectories; 0: always `run.groups_per_update`
    prompts."""
    prompt_prior: PromptName = "off"
    """Estimate the risk of each `kind` of task, or of each `task` that comes again, by itself; their groups may then
    differ in size within an update."""
    prompt_strength: PositiveFloat = 4.0
    """`prompt_prior`: groups' worth of evidence that the estimate over all prompts lends to that of one prompt."""
