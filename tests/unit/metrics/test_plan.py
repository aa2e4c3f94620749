"""The memory plan: its parameters are those of the models, its sums those of its parts, its limits the right ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from examples.policies.build.tiny import make_tiny
from megathunder.cli.train import main
from megathunder.config import Config
from megathunder.config.checks import check, check_plan
from megathunder.config.learner import LearnerConfig
from megathunder.config.load import load_config
from megathunder.config.model_shape import ModelShape, read_model_shape
from megathunder.errors import ConfigError
from megathunder.learner.accumulators.host import BUFFERS, PIECE
from megathunder.learner.learner import Learner
from megathunder.learner.parallel import initialize
from megathunder.planning.footprint import (
    COPY_BUFFER_BYTES,
    Parameters,
    adapter_parameters,
    rank_parameters,
    trained_parameters,
)
from megathunder.planning.plan import make_plan, plan_lines

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LARGE = ("qwen3_30b_a3b_8gpu", "qwen3_30b_a3b_64gpu", "glm45_air_8gpu", "glm45_air_64gpu")
SHAPE = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_size=4, ffn=16, vocabulary=32)
GIB = 2**30


def with_changes(**sections: dict[str, object]) -> Config:
    config = Config()
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def large(name: str) -> Config:
    return load_config(["--config", str(EXAMPLES / f"{name}.toml")])


def quantity(text: str) -> float:
    """Bytes of "1,259.68 GiB"."""
    number, unit = text.split()
    return float(number.replace(",", "")) * {"GiB": GIB, "MiB": 2**20, "KiB": 2**10, "B": 1}[unit]


@pytest.mark.parametrize(
    ("name", "published", "exact"),
    [
        ("qwen3_30b_a3b", 30.5e9, 30_532_122_624),
        ("glm45_air", 106e9, 106_852_245_504),  # its prediction layer of a further 3 B is not trained and not counted
    ],
)
def test_parameters_are_exactly_those_of_the_published_model(name: str, published: float, exact: int) -> None:
    folder = EXAMPLES / "models" / name
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sum(p.numel() for p in model.parameters()) == exact == read_model_shape(folder).parameters
    assert abs(exact / published - 1) < 0.01


@pytest.mark.parametrize("family", ["qwen2", "mistral", "qwen3", "llama", "qwen3_moe", "glm4_moe"])
def test_a_rank_holds_what_the_learner_that_is_built_holds(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family)
    config = with_changes(learner={"model": str(folder), "device": "cpu"})
    learner = Learner(config, initialize(config.learner))
    assert rank_parameters(read_model_shape(folder), config.learner).total == learner.local_parameters
    adapted = with_changes(learner={"model": str(folder), "device": "cpu", "lora_rank": 4})
    trained = Learner(adapted, initialize(adapted.learner)).store.layout.elements
    assert adapter_parameters(read_model_shape(folder), adapted.learner).total == trained


def test_shares_of_all_ranks_add_up_to_the_model() -> None:
    shape = read_model_shape(EXAMPLES / "models" / "qwen3_30b_a3b")
    layout = LearnerConfig(pipeline_parallel=4, expert_parallel=8)
    stages = [rank_parameters(shape, layout, stage) for stage in range(4)]
    assert sum(s.dense for s in stages) + 8 * sum(s.expert for s in stages) == shape.parameters
    assert max(stages, key=lambda s: s.total) == rank_parameters(shape, layout)
    uneven = dataclasses.replace(layout, pipeline_parallel=5)
    stages_of_5 = [rank_parameters(shape, uneven, stage) for stage in range(5)]
    assert sum(s.dense for s in stages_of_5) + 8 * sum(s.expert for s in stages_of_5) == shape.parameters
    interleaved = dataclasses.replace(layout, virtual_pipeline=3)
    assert rank_parameters(shape, interleaved, 1) == stages[1]


def test_the_large_plan_equals_a_sum_by_hand() -> None:
    config = large("qwen3_30b_a3b_64gpu")
    hidden, layers = 2048, 48
    attention = hidden * 128 * (2 * 32 + 2 * 4) // 4  # over 4 tensor ranks
    dense = layers * (attention + 2 * hidden + 2 * 128 + hidden * 128) + 2 * 151936 // 4 * hidden + hidden
    expert = layers * 3 * hidden * 768 * 128 // 16  # over 16 expert ranks
    plan = make_plan(config, read_model_shape(config.learner.model), ranks=32)
    local, memory = dense + expert, plan.memory
    assert plan.parameters == Parameters(dense=dense, expert=expert)
    assert memory.weights == 2 * local
    assert memory.gradient == 4 * local
    assert memory.scratch == 2 * 4 * local + COPY_BUFFER_BYTES == 2 * 4 * local + BUFFERS * PIECE * 4
    assert memory.optimizer == 12 * (dense // 8 + expert // 2)  # 32 ranks / 4 tensor; / 16 expert
    assert memory.accumulators == 4 * local * 2 * 6  # two rewards, six open groups
    assert memory.device_parts["accumulators"] == 0
    assert memory.checkpoint == memory.weights + memory.optimizer  # a copy, while it is written
    assert memory.host == memory.accumulators + 6 * GIB + memory.checkpoint
    assert plan.cells == 2
    assert plan.node_bytes == 8 * memory.host + (64 * 512 + 128 * 32) * 2**20


@pytest.mark.parametrize("name", LARGE)
def test_every_printed_total_is_the_sum_of_its_printed_parts(name: str) -> None:
    config = large(name)
    lines = dict(plan_lines(make_plan(config, read_model_shape(config.learner.model), ranks=4)))
    for line in ("a learner rank", "its host memory", "a GPU of a server"):
        total, _, parts = lines[line].partition(":")[0].partition(" = ")
        found = [quantity(part) for part in re.findall(r"[\d,.]+ (?:GiB|MiB|KiB|B)\b", parts)]
        assert len(found) == parts.count("+") + 1
        assert abs(sum(found) - quantity(total)) < 0.006 * len(found) * GIB, line
    total, dense, expert = re.match(r"([\d,]+) \(\S+ = dense ([\d,]+) \(\S+ \+ expert ([\d,]+)", _rank(lines)).groups()
    assert int(total.replace(",", "")) == int(dense.replace(",", "")) + int(expert.replace(",", ""))


def _rank(lines: dict[str, str]) -> str:
    return lines["parameters of a rank"]


@pytest.mark.parametrize("name", LARGE)
def test_a_large_run_is_planned_without_weights_or_gpu_and_fits(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["--config", str(EXAMPLES / f"{name}.toml"), "--plan"]) == 0
    text = capsys.readouterr().out
    assert "EXCEEDED" not in text
    assert "learner GPU" in text and "server GPU" in text and "host" in text
    gpus = int(name.rpartition("_")[2].removesuffix("gpu"))
    assert f"= {gpus} on {-(-gpus // 8)} machine(s)" in " ".join(text.replace("│", " ").split())


def test_a_folder_without_weights_plans_and_does_not_train(tmp_path: Path) -> None:
    config = dataclasses.replace(large("glm45_air_8gpu"), run=dataclasses.replace(Config().run, folder=str(tmp_path)))
    check_plan(config, ranks=4)
    with pytest.raises(ConfigError, match="no tokenizer.json and no weights"):
        check(config, ranks=4)


def test_another_number_of_ranks_than_the_layout_is_meant_for_is_refused(tmp_path: Path) -> None:
    base = with_changes(run={"folder": str(tmp_path)}, hardware={"learner_ranks": 4})
    model = str(EXAMPLES / "policies" / "student")
    config = dataclasses.replace(base, learner=dataclasses.replace(base.learner, model=model))
    with pytest.raises(ConfigError, match="2 learner rank.*learner_ranks = 4"):
        check(config, ranks=2)


def test_an_unknown_gpu_needs_its_memory() -> None:
    config = with_changes(hardware={"gpu": "H9000"}, learner={"model": str(EXAMPLES / "models" / "glm45_air")})
    with pytest.raises(ConfigError, match="H9000"):
        check_plan(config, ranks=1)
    told = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, gpu_memory_gib=500))
    check_plan(told, ranks=1)
    assert make_plan(told, SHAPE).device_limit_bytes == 500 * GIB


def test_the_plan_counts_what_will_happen() -> None:
    config = with_changes(run={"updates": 10, "groups_per_update": 4, "group_size": 8}, rollout={"max_tokens": 100})
    lines = dict(plan_lines(make_plan(config, SHAPE, ranks=2)))
    assert lines["updates"] == "10 of 4 groups x 8 = 32 trajectories"
    assert lines["tokens"] == "at most 3.2k an update, 32k in all"
    assert "2 learner rank(s) in 2 cell(s), 1 coordinator, 1 server(s) started here" in lines["processes"]


def test_accumulators_are_trained_parameters_by_classes_by_open_groups() -> None:
    config = with_changes(run={"groups_per_update": 8}, streaming={"max_open_groups": 4})
    held = SHAPE.parameters
    assert make_plan(config, SHAPE).memory.accumulators == held * 4 * 2 * 4
    exact = make_plan(with_changes(learner={"accumulator": "exact"}), SHAPE)
    assert exact.memory.accumulators == held * 8 * 2 * 8
    assert exact.memory.scratch == held * 8
    sync = make_plan(dataclasses.replace(config, schedule="sync"), SHAPE)
    assert sync.memory.accumulators == 0
    assert dict(plan_lines(sync))["accumulators"] == "none: all work is direct"
    early = with_changes(streaming={"content_ready": True, "max_per_trajectory_accumulators": 4})
    assert make_plan(early, SHAPE).memory.accumulators == held * 4 * (2 * 8 + 4)
    adapted = with_changes(learner={"lora_rank": 2})
    trained = trained_parameters(SHAPE, adapted.learner).total
    assert make_plan(adapted, SHAPE).memory.accumulators == trained * 4 * 2 * 8


def test_the_plan_says_what_an_advantage_that_is_not_affine_does_beyond_the_classes() -> None:
    held = SHAPE.parameters
    graded = {"run": {"groups_per_update": 8, "group_size": 4}, "reward": {"function": ("mine.py:score",)}}
    table = with_changes(**graded, grpo={"advantage": "pass_at_k"}, streaming={"max_per_trajectory_accumulators": 3})
    assert make_plan(table, SHAPE).memory.accumulators == held * 4 * (2 * 8 + 3)
    lines = dict(plan_lines(make_plan(table, SHAPE)))
    assert "more than 2 different rewards" in lines["beyond them"] and "at most 3 per cell" in lines["beyond them"]
    affine = make_plan(with_changes(**graded), SHAPE)
    assert affine.memory.accumulators == held * 4 * (2 + 2) * 8 and "beyond them" not in dict(plan_lines(affine))
    several = make_plan(with_changes(**graded, grpo={"advantage": "gdpo", "reward_weights": (1.0, 1.0, 2.0)}), SHAPE)
    assert several.memory.accumulators == held * 4 * (2 + 1 + 3) * 8
    waiting = dataclasses.replace(table, schedule="sync")
    assert "beyond them" not in dict(plan_lines(make_plan(waiting, SHAPE)))


def test_the_plan_names_the_limit_that_is_near() -> None:
    plan = make_plan(Config(), SHAPE)
    for limit, state in (
        (plan.host_bytes * 10, "ample"),
        (int(plan.host_bytes * 1.1), "near"),
        (plan.host_bytes // 2, "EXCEEDED"),
    ):
        lines = dict(plan_lines(make_plan(Config(), SHAPE, host_limit_bytes=limit)))
        assert state in lines["this host"]
    assert "this host" not in dict(plan_lines(plan))


def test_memory_of_a_rank_is_divided_by_the_layout() -> None:
    memory = make_plan(Config(), SHAPE).memory
    assert memory.device == sum(memory.device_parts.values())
    assert memory.weights == memory.gradient == 4 * SHAPE.parameters
    half = make_plan(with_changes(learner={"tensor_parallel": 2}), SHAPE, ranks=2)
    vectors = SHAPE.hidden * (2 * SHAPE.layers + 1)
    assert half.parameters.total == (SHAPE.parameters - vectors) // 2 + vectors
    assert half.cells == 1
    sharded = make_plan(with_changes(learner={"distributed_optimizer": True}), SHAPE, ranks=4)
    assert sharded.memory.optimizer == memory.optimizer // 4


def test_copies_that_publication_keeps_are_counted() -> None:
    shape = read_model_shape(Config().learner.model)
    plain, delta, adapter = (
        make_plan(with_changes(publish=publish, learner={"lora_rank": 4}), shape)
        for publish in ({}, {"transport": "delta"}, {"lora": "adapter"})
    )
    copy = 4 * shape.parameters
    assert delta.host_bytes - plain.host_bytes == copy
    assert adapter.host_bytes - plain.host_bytes == 2 * copy, "rank 0's and that of one server"
    told = dict(plan_lines(adapter))["publication"]
    assert quantity(re.search(r"host memory, ([\d.,]+ \w+)", told)[1]) == pytest.approx(copy, rel=0.01)
    assert "publication" not in dict(plan_lines(plain))
