"""Free tables: any name that the installed engine has, and the nearest one where it has it not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megathunder.config import Config
from megathunder.config.load import load_config
from megathunder.config.pass_through import MEGATRON, check_passed_names, known_names
from megathunder.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def with_table(section: str, key: str, table: dict[str, str]) -> Config:
    base = Config()
    return dataclasses.replace(base, **{section: dataclasses.replace(getattr(base, section), **{key: table})})


def test_every_field_of_megatrons_classes_is_known() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    assert {f.name for owner in classes for f in dataclasses.fields(owner)} <= known_names("megatron", MEGATRON)


@pytest.mark.parametrize(
    ("section", "key", "name", "nearest"),
    [
        ("learner", "megatron", "moe_router_topk_scaling_facto", "moe_router_topk_scaling_factor"),
        ("rollout", "sglang", "mem_fraction_statik", "mem_fraction_static"),
        ("rollout", "sglang", "tensor_paralel_size", "tensor_parallel_size"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(section: str, key: str, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}\.{name} is no field(.|\n)*did you mean {nearest}\?"):
        check_passed_names(with_table(section, key, {name: "1"}))


@pytest.mark.parametrize("name", ["tp_size", "tensor-parallel-size", "enable_metrics", "mem_fraction_static"])
def test_names_of_the_engines_command_line_are_known(name: str) -> None:
    check_passed_names(with_table("rollout", "sglang", {name: "1"}))


def test_examples_use_known_names() -> None:
    for file in sorted(EXAMPLES.glob("*.toml")):
        check_passed_names(load_config(["--config", str(file)]))
