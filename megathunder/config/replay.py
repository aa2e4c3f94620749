"""A replay: the trajectories of a recorded run instead of engines, sandboxes and teachers."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.field_types import InputPath, NonNegativeFloat, NonNegativeInt, PositiveFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """[replay] a recorded run as the source of trajectories. Set by tools/replay.py and tools/compare.py."""

    run: InputPath = ""
    """Folder of the recorded run; empty: trajectories are sampled."""
    updates: tuple[int, ...] = ()
    """Recorded updates to take, in this order and from the start again when they are used up; empty: all."""
    speed: PositiveFloat = 1.0
    """Recorded release times are divided by this."""
    shuffle_seed: NonNegativeInt = 0
    """Exchange the release times of an update's trajectories at random with this seed; 0: as recorded."""
    verifier_s: NonNegativeFloat = 0.0
    """Added to the time each reward takes after its trajectory is complete."""
    learn: bool = False
    """Take real steps. Otherwise the learning rate is 0: every update starts from the run's first policy."""
