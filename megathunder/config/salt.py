"""Coefficients reweighted by the geometry of the trajectories' gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import NonNegativeFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class SaltConfig:
    """[salt] subspace-adaptive reweighting of GRPO's coefficients."""

    amplification: NonNegativeFloat = 0.0
    """How much more the residual channel weighs where cancellation is total; 0: plain GRPO."""
    measure: bool = False
    """Measure and log the geometry at amplification 0 as well; costs what SALT costs, one accumulator a trajectory."""
    scope: Literal["group", "batch"] = "group"
    """Trajectories that share a Gram matrix: those of a group, or all of an update."""
    explained_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """The dominant subspace is the smallest that holds this share of the Gram matrix's trace."""
    severe_cancellation: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    """Cancellation from which on the residual is amplified (0: as if gradients were orthogonal, 1: all is lost)."""
    features: Literal["exact", "sketch"] = "exact"
    """Inner products of whole gradients, or of random projections of `sketch_layers`."""
    # 4 MiB a trajectory; products err by a thousandth of the norms
    sketch_dimension: Annotated[int, Meta(gt=0, le=1048576)] = 4096
    """Numbers a gradient is projected to."""
    sketch_layers: tuple[str, ...] = ()
    """Parts of the names of the parameters that are projected (`layers.0.`, `mlp`); empty: all."""

    @property
    def active(self) -> bool:
        """Whether every trajectory's gradient must be kept apart until its coefficient is known."""
        return self.amplification > 0 or self.measure
