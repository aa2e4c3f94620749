"""Which models the learner knows, and what each of them can do: `family_of(config.json)`, `support_table()`.

The families are those of `registry.MODEL_FAMILIES`; what a family supports is found by asking the checks themselves
(`layout_checks.py`, `compatibility.py`) about a small model of that family. Nothing here imports torch.
Called by the checks, by the learner's model builder and by the documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, get_args

from megathunder.config.compatibility import conflicts
from megathunder.config.layout_checks import check_model_split, check_ranks
from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import ModelShape
from megathunder.config.root import Config
from megathunder.config.streaming import ReleaseName
from megathunder.errors import ConfigError
from megathunder.registry import MODEL_FAMILIES

PROBE = ModelShape(layers=8, hidden=64, heads=8, kv_heads=4, head_size=8, ffn=64, vocabulary=64)
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 64, "dense_layers": 0}
LAYOUTS = {
    "tensor": LearnerConfig(tensor_parallel=2),
    "tensor with sequence": LearnerConfig(tensor_parallel=2, sequence_parallel=True),
    "pipeline": LearnerConfig(pipeline_parallel=2),
    "virtual pipeline": LearnerConfig(pipeline_parallel=2, virtual_pipeline=2),
    "context": LearnerConfig(context_parallel=2),
    "expert": LearnerConfig(expert_parallel=2),
}


class ModelFamily(Protocol):
    """What checks need to know of a family; `learner/model/families/rules.py` has the rest."""

    architecture: str
    model_type: str
    models: str

    @property
    def mixture(self) -> bool: ...

    @property
    def linear_layers(self) -> tuple[str, ...]: ...

    def settings(self, hf: dict[str, Any], /) -> dict[str, Any]: ...


class Support(NamedTuple):
    """One row of the table."""

    architecture: str
    models: str
    layouts: str
    lora: str
    releases: str


def families() -> list[ModelFamily]:
    """All known families, by architecture."""
    return [MODEL_FAMILIES.get(name) for name in MODEL_FAMILIES.names()]


def family_of(hf: dict[str, Any]) -> Any:
    """The family of config.json's `architectures`. Raises ConfigError with the table of known ones."""
    named = hf.get("architectures") or []
    for family in families():
        if family.architecture in named or (not named and hf.get("model_type") == family.model_type):
            return family
    seen = ", ".join(named) or hf.get("model_type")
    rows = [f"{row.architecture} ({row.models}): {row.layouts} parallel; LoRA" for row in support_table()]
    raise ConfigError(
        f"config.json names {f'the architecture {seen}' if seen else 'no architecture'}",
        expected="one of\n    " + "\n    ".join(rows),
        remedy="use a model of a known architecture, or add a file to megathunder/learner/model/families/",
    )


def check_family(hf: dict[str, Any], learner: LearnerConfig) -> None:
    """The learner can build this model, and its adapters' targets exist. Raises ConfigError."""
    family = family_of(hf)
    family.settings(hf)  # raises for a key that is missing and for variants that it cannot compute
    unknown = sorted(set(learner.lora_targets) - set(family.linear_layers))
    if learner.lora_rank and unknown:
        raise ConfigError(
            f"learner.lora_targets names {', '.join(unknown)}, which {family.architecture} does not have",
            expected=f"some of {', '.join(family.linear_layers)}",
            remedy="correct learner.lora_targets",
        )


def support_table() -> list[Support]:
    """What each family supports."""
    return [_support(family) for family in families()]


def _support(family: ModelFamily) -> Support:
    shape = dataclasses.replace(PROBE, **EXPERTS) if family.mixture else PROBE
    layouts = [name for name, learner in LAYOUTS.items() if _fits(learner, shape)]
    return Support(
        architecture=family.architecture,
        models=family.models,
        layouts=", ".join(layouts),
        lora=", ".join(family.linear_layers) if _fits(LearnerConfig(lora_rank=8), shape) else "no",
        releases="; ".join(_releases(family)),
    )


def _fits(learner: LearnerConfig, shape: ModelShape) -> bool:
    try:
        check_ranks(learner, learner.ranks_of_a_cell)
        check_model_split(learner, shape)
    except ConfigError:
        return False
    return True


def _releases(family: ModelFamily) -> Iterator[str]:
    legal = _legal_releases(LearnerConfig())
    yield ", ".join(legal)
    coupled = _legal_releases(LearnerConfig(expert_parallel=2))
    if family.mixture and coupled != legal:
        yield f"with experts over replicas {', '.join(coupled)}"


def _legal_releases(learner: LearnerConfig) -> list[str]:
    base = Config(objective="opd", learner=learner)
    return [
        release
        for release in get_args(ReleaseName)
        if not any(conflicts(dataclasses.replace(base, streaming=dataclasses.replace(base.streaming, release=release))))
    ]
