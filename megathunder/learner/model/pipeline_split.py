"""How many layers each pipeline stage holds where they do not divide evenly.

    first, middle, ..., middle, last      first + (stages - 2) middle + last = layers

Megatron-Core lets the first and the last stage differ from the others. The split with the smallest largest stage is
chosen; of an odd remainder the first stage takes the larger half, because the last one also projects to the vocabulary.
Called by `model.transformer_config_of`. Refuses more stages than layers.

    uneven_stages(3, 2) == (2, 1)        uneven_stages(61, 8) == (7, 6), with 8 in each of the six others
"""

from __future__ import annotations

from megathunder.errors import ConfigError


def uneven_stages(layers: int, stages: int) -> tuple[int, int]:
    """Layers of the first and of the last of `stages` (2 or more) stages; every stage has at least one."""
    if layers < stages:
        raise ConfigError(
            f"{layers} layers over pipeline_parallel {stages}",
            expected="at least one layer a stage",
            remedy=f"set learner.pipeline_parallel to {layers} or less",
        )
    between = stages - 2
    choices = [m for m in range(1, layers + 1) if layers - between * m >= 2] if between else [0]
    middle = min(choices, key=lambda m: max(m, -(-(layers - between * m) // 2)))
    ends = layers - between * middle
    return ends - ends // 2, ends // 2
