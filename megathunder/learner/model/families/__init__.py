"""Model families: what config.json says becomes Megatron settings and a table of weight rules.

Each family is registered by the name of its architecture (`registry.MODEL_FAMILIES`). Nothing here imports torch, so
that checks and plans can ask which models are known.
"""

from __future__ import annotations

from megathunder.learner.model.families import glm4_moe, llama, mistral, qwen2, qwen3, qwen3_moe
from megathunder.learner.model.families.rules import Family

FAMILIES: tuple[Family, ...] = (
    qwen2.FAMILY,
    qwen3.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    qwen3_moe.FAMILY,
    glm4_moe.FAMILY,
)
