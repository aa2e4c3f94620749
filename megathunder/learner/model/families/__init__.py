"""Model families: what config.json says becomes Megatron settings and a table of weight rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megathunder.errors import ConfigError
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


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConfigError where there is none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"no config.json in {folder}",
            expected="a Hugging Face model folder: config.json, *.safetensors and the tokenizer's files",
            remedy="set learner.model to such a folder (tools/convert.py --help says how to make one)",
        )
    return json.loads(path.read_text())


def family_of(hf: dict[str, Any]) -> Family:
    """The family of config.json's `architectures`. Raises ConfigError listing the known ones."""
    named = hf.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in named or (not named and hf.get("model_type") == family.model_type):
            return family
    known = ", ".join(f.architecture for f in FAMILIES)
    raise ConfigError(
        f"architecture {', '.join(named) or hf.get('model_type')} in config.json",
        expected=f"one of {known}",
        remedy="use a model of a known architecture, or add a file to megathunder/learner/model/families/",
    )
