"""What goes together and what does not: a plan, a run and the learner give the same answer, before anything starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megathunder.config import Config
from megathunder.config.checks import check, check_plan
from megathunder.config.compatibility import check_compatibility, conflicts
from megathunder.config.layout_checks import check_model_split, check_ranks
from megathunder.config.model_families import families, support_table
from megathunder.config.model_shape import read_model_shape
from megathunder.errors import ConfigError
from megathunder.objectives.build_objective import build_objective
from tests.unit.config.config_cases import MIXTURE, SHAPE, change, legal, model_folder

DENSE: list[tuple[dict[str, object], int, str, str]] = [
    ({"learner__context_parallel": 4}, 4, "2 key-value heads", "context_parallel"),
    ({"learner__context_parallel": 2, "learner__tensor_parallel": 2}, 4, "1 on a tensor-parallel rank", "lower"),
    ({"learner__virtual_pipeline": 3}, 1, "virtual_pipeline = 3 with learner.pipeline_parallel = 1", "= 1"),
    (
        {
            "learner__virtual_pipeline": 2,
            "learner__pipeline_parallel": 2,
            "learner__megatron": {"overlap_p2p_comm": "false"},
        },
        2,
        "overlap_p2p_comm = false",
        "remove both",
    ),
    ({"streaming__release": "turn_forward", "learner__shared_prompt": "group"}, 1, "'turn_forward'", "'off'"),
    ({"streaming__release": "turn_forward", "learner__shared_prompt": "packed"}, 1, "'packed'", "'trajectory'"),
    ({"learner__accumulator": "exact", "learner__shared_prompt": "packed"}, 1, "accumulator = 'exact'", "'off'"),
    ({"learner__accumulator": "exact", "learner__shared_prompt": "group"}, 1, "shared_prompt = 'group'", "'off'"),
    ({"learner__shared_prompt": "group", "learner__accumulator_shards": 2}, 2, "cells of 2 replicas", "packed"),
    ({"grpo__clip_low": 0.2}, 1, "with schedule = 'thundersync'", "one_step_off"),
    ({"grpo__clip_high": 0.2, "schedule": "sync", "learner__accumulator": "exact"}, 1, "'exact'", "fp32"),
    (
        {"objective": "opd", "streaming__release": "turn", "loss__normalisation": "sequence_mean"},
        1,
        "sequence_mean",
        "token_mean",
    ),
    ({"objective": "opd", "streaming__on_lost": "drop_group"}, 1, "drop_group", "shrink"),
    ({"learner__lora_rank": 8, "learner__lora_targets": ("q_proj", "mlp")}, 1, "names mlp", "lora_targets"),
]
EXPERTS: list[tuple[dict[str, object], int, str, str]] = [
    ({"learner__expert_parallel": 2, "learner__tensor_parallel": 2}, 4, "sequence_parallel = false", "= true"),
    ({"learner__tensor_parallel": 2}, 2, "sequence_parallel = false", "sequence_parallel = true"),
    ({"learner__expert_parallel": 2, "learner__shared_prompt": "packed"}, 2, "over 2 replicas", "expert_parallel = 1"),
    ({"learner__expert_parallel": 2, "learner__shared_prompt": "group"}, 2, "over 2 replicas", "'off'"),
    ({"learner__expert_parallel": 2, "streaming__release": "turn_forward"}, 2, "'turn_forward'", "'trajectory'"),
    ({"learner__expert_parallel": 3}, 3, "4 experts", "1, 2, 4"),
    ({"learner__lora_rank": 8, "learner__megatron": {"moe_grouped_gemm": "true"}}, 1, "moe_grouped_gemm", "remove"),
    (
        {
            "learner__lora_rank": 8,
            "learner__tensor_parallel": 4,
            "learner__expert_tensor_parallel": 2,
            "learner__sequence_parallel": True,
        },
        4,
        "expert_tensor_parallel = 2",
        "one of these",
    ),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    folder = tmp_path_factory.mktemp("models")
    dense = legal(folder)
    wide = {"num_key_value_heads": 4}
    experts = change(dense, learner__model=model_folder(folder / "experts", **MIXTURE, **wide))
    return {"dense": dense, "experts": experts}


@pytest.mark.parametrize(
    ("base", "settings", "ranks", "seen", "remedy"),
    [("dense", *row) for row in DENSE] + [("experts", *row) for row in EXPERTS],
)
def test_what_the_learner_cannot_run_is_refused_by_plan_and_check(
    base: str, settings: dict[str, object], ranks: int, seen: str, remedy: str, bases: dict[str, Config]
) -> None:
    config = change(bases[base], **settings)
    for refuse in (lambda: check_plan(config, ranks=ranks), lambda: check(config, ranks=ranks)):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert seen in refused.value.seen, refused.value
        assert remedy in refused.value.remedy, refused.value


def test_legal_combinations_pass(bases: dict[str, Config]) -> None:
    for base, settings, ranks in (
        ("dense", {"learner__context_parallel": 2}, 2),
        ("dense", {"learner__virtual_pipeline": 2, "learner__pipeline_parallel": 2}, 2),
        ("dense", {"learner__pipeline_parallel": 3}, 3),
        ("dense", {"learner__shared_prompt": "group"}, 2),
        ("dense", {"grpo__clip_low": 0.2, "schedule": "one_step_off"}, 1),
        ("dense", {"objective": "opd", "grpo__clip_low": 0.2}, 1),
        ("experts", {"learner__expert_parallel": 2}, 2),
        (
            "experts",
            {"learner__expert_parallel": 2, "learner__tensor_parallel": 2, "learner__sequence_parallel": True},
            4,
        ),
        (
            "experts",
            {
                "learner__expert_parallel": 2,
                "learner__tensor_parallel": 2,
                "learner__sequence_parallel": True,
                "learner__expert_tensor_parallel": 1,
                "streaming__release": "turn_forward",
            },
            2,
        ),
    ):
        check_plan(change(bases[base], **settings), ranks=ranks)


def test_the_learner_and_the_objectives_ask_the_same_place(bases: dict[str, Config]) -> None:
    """What a plan refuses, whoever builds the part refuses with the same words."""
    config = change(bases["dense"], streaming__release="turn")
    with pytest.raises(ConfigError) as by_plan:
        check_compatibility(config)
    with pytest.raises(ConfigError) as by_objective:
        build_objective(config)
    assert str(by_plan.value) == str(by_objective.value)
    assert not list(conflicts(bases["dense"]))


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Phi3ForCausalLM", "GptOssForCausalLM"])
def test_an_unknown_architecture_is_refused_with_the_supported_ones(
    architecture: str, bases: dict[str, Config], tmp_path: Path
) -> None:
    config = change(bases["dense"], learner__model=model_folder(tmp_path, architectures=[architecture]))
    started = time.monotonic()
    with pytest.raises(ConfigError, match=architecture) as refused:
        check_plan(config, ranks=1)
    assert time.monotonic() - started < 1
    for family in families():
        assert family.architecture in refused.value.expected
    assert "tensor" in refused.value.expected and "LoRA" in refused.value.expected


def test_the_support_table_says_what_the_checks_say(tmp_path: Path) -> None:
    """A row is true: each layout that it names is legal for such a model, and each that it leaves out is not."""
    rows = {row.architecture: row for row in support_table()}
    assert "expert" in rows["Qwen3MoeForCausalLM"].layouts and "expert" not in rows["Qwen3ForCausalLM"].layouts
    assert rows["Qwen3MoeForCausalLM"].releases.endswith("with experts over replicas trajectory")
    shape = read_model_shape(model_folder(tmp_path / "dense", num_key_value_heads=4))
    learner = Config().learner
    check_model_split(change(Config(), learner__tensor_parallel=2).learner, shape)
    check_ranks(learner, 1)


@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads", "vocab_size", "hidden_size"])
def test_a_key_that_config_json_lacks_is_named(key: str, bases: dict[str, Config], tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in SHAPE.items() if k != key}))
    with pytest.raises(ConfigError, match=f"config.json has no {key}"):
        check_plan(change(bases["dense"], learner__model=folder), ranks=1)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_key_that_a_mixture_lacks_is_named(key: str, bases: dict[str, Config], tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    content = {k: v for k, v in {**SHAPE, **MIXTURE}.items() if k != key}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"config.json has no {key}"):
        check_plan(change(bases["dense"], learner__model=folder), ranks=1)


def test_other_rotary_scaling_is_refused_in_a_plan(bases: dict[str, Config], tmp_path: Path) -> None:
    folder = model_folder(tmp_path, rope_scaling={"rope_type": "yarn"})
    with pytest.raises(ConfigError, match="rope_type 'yarn'"):
        check_plan(change(bases["dense"], learner__model=folder), ranks=1)
