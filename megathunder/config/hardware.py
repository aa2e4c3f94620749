"""The machines a run is meant for, so that its memory can be planned elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.field_types import NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """[hardware] what the memory plan compares its sums with; a run on the machine itself may leave it alone."""

    gpu: str = ""
    """GPU by name (`H100`, `H200`, `A100`, ...), whose memory is known; empty: what the driver says."""
    gpu_memory_gib: NonNegativeFloat = 0.0
    """Memory of one GPU where the name does not tell it; 0: as `gpu` says."""
    gpus_per_node: PositiveInt = 8
    """GPUs of one machine; its learner ranks share its host memory."""
    host_memory_gib: NonNegativeFloat = 0.0
    """Memory of one machine; 0: not compared (on the machine itself: what it has)."""
    learner_ranks: NonNegativeInt = 0
    """Learner processes the layout is meant for; another number under torchrun is refused. 0: as many as there are."""
