"""Accumulators that do not fit are refused before anything starts, with bytes, limit and what would fit."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from megathunder.cli import train
from megathunder.config import Config
from megathunder.config.model_shape import ModelShape
from megathunder.errors import ConfigError
from megathunder.planning.budget import check_memory_fits
from megathunder.planning.footprint import accumulators_held
from megathunder.planning.memory import host_limit_bytes
from megathunder.planning.plan import Plan, make_plan, plan_lines
from tests.unit.config.config_cases import change

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=512)
MIXTURE = ModelShape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_size=16, ffn=128, vocabulary=512, experts=4, experts_per_token=2,
    expert_ffn=64,
)  # fmt: skip


def planned(ranks: int = 1, limits: dict[str, int] | None = None, **settings: object) -> Plan:
    return make_plan(change(Config(), **settings), SHAPE, ranks=ranks, samples=False, **limits or {})


def exact_bytes(plan: Plan) -> int:
    memory = plan.memory
    return memory.device - memory.activations - memory.logits


@pytest.mark.parametrize("where", ["host", "gpu", "host of a gpu"])
def test_one_byte_too_little_is_refused_with_the_numbers(where: str) -> None:
    settings = {} if where == "host" else {"learner__device": "cuda"}
    if where == "host of a gpu":
        settings["learner__accumulator_placement"] = "host"
    memory = planned(**settings).memory
    on_host = memory.host
    need = {"host": exact_bytes(planned()), "gpu": exact_bytes(planned(**settings)),
            "host of a gpu": on_host}[where]  # fmt: skip
    limit = {"gpu": "gpu_bytes"}.get(where, "host_limit_bytes")
    check_memory_fits(planned(limits={limit: need}, **settings))
    with pytest.raises(ConfigError) as refused:
        check_memory_fits(planned(limits={limit: need - 1}, **settings))
    said = refused.value
    assert "16 accumulators take" in said.seen and "max_open_groups = 7" in said.remedy
    assert {"host": "this host", "gpu": "one learner GPU", "host of a gpu": "host memory of one"}[where] in said.seen
    assert ("accumulator_placement = 'host'" in said.remedy) == (where == "gpu")
    assert "learner.lora_rank" in said.remedy and "schedule = 'sync'" in said.remedy


def test_the_open_groups_that_the_remedy_names_fit_and_one_more_does_not() -> None:
    limit = {"host_limit_bytes": exact_bytes(planned()) - 5 * planned().memory.gradient}
    with pytest.raises(ConfigError) as refused:
        check_memory_fits(planned(limits=limit))
    groups = int(re.search(r"max_open_groups = (\d+)", refused.value.remedy)[1])
    check_memory_fits(planned(limits=limit, streaming__max_open_groups=groups))
    with pytest.raises(ConfigError):
        check_memory_fits(planned(limits=limit, streaming__max_open_groups=groups + 1))


def test_the_limit_may_be_a_setting_and_the_run_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "check", lambda config: None)
    monkeypatch.setattr(train, "run_rank", lambda *_, **__: pytest.fail("the run began"))
    words = ["--config", "examples/shell_grpo.toml", f"--run.folder={tmp_path}", "--hardware.host_memory_gib", "0.12"]
    assert train.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: 16 accumulators take 40.07 MiB") and "122.88 MiB" in said
    assert not list(tmp_path.iterdir())


def test_work_without_accumulators_is_never_refused_for_them() -> None:
    for settings in ({"schedule": "sync"}, {"objective": "opd"}, {"schedule": "periodic_async"}):
        check_memory_fits(planned(limits={"host_limit_bytes": 1}, **settings))


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({}, (16, 0)),
        ({"streaming__max_open_groups": 3}, (6, 0)),
        ({"streaming__content_ready": True}, (16, 16)),
        ({"schedule": "sync"}, (0, 0)),
        ({"schedule": "sync", "learner__accumulator": "exact"}, (16, 0)),  # folded once, from classes alone
        ({"tasks__source": "terminal"}, (32, 0)),  # rewards between 0 and 1: two classes and two moments
        ({"tasks__source": "terminal", "learner__accumulator": "exact"}, (64, 0)),  # a class a distinct reward
        ({"grpo__overlong_buffer_tokens": 64, "streaming__reward_values": 8}, (64, 0)),
    ],
)
def test_what_a_cell_may_hold_follows_from_rewards_and_sums(settings: dict[str, object], held: tuple[int, int]) -> None:
    assert accumulators_held(change(Config(), **settings)) == held


def test_shards_divide_the_accumulators_and_the_plan_says_when_that_pays() -> None:
    whole, shared = planned(ranks=4).memory, planned(ranks=4, learner__accumulator_shards=4).memory
    assert shared.accumulators == whole.accumulators // 4 and shared.scratch == whole.gradient
    said = dict(plan_lines(planned(ranks=4)))["sharding them"]
    assert "accumulator_shards = 4 saves" in said and "cells of 4 replicas" in said
    small = planned(ranks=2, streaming__max_open_groups=1)  # two accumulators halved, and one scratch
    assert "saves nothing" in dict(plan_lines(small))["sharding them"]
    assert "sharding them" not in dict(plan_lines(planned()))
    assert planned(ranks=4, learner__accumulator_shards=4).cells == 1 and planned(ranks=4).cells == 4


def test_experts_are_shared_by_the_ranks_that_hold_the_same_ones() -> None:
    config = change(Config(), learner__expert_parallel=2, learner__accumulator_shards=4)
    whole = change(Config(), learner__expert_parallel=2)
    made, plain = (make_plan(c, MIXTURE, ranks=4).memory for c in (config, whole))
    trained = make_plan(config, MIXTURE, ranks=4).trained
    assert plain.accumulators == 16 * 4 * trained.total
    assert made.accumulators == 16 * 4 * (trained.dense // 4 + trained.expert // 2)


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "max\n"}),
        ("0::/\n", {"memory.max": "1000\n"}),
        ("9:cpu:/x\n7:memory:/a\n", {"memory/a/memory.limit_in_bytes": "1000\n"}),
        ("7:cpu,memory:/a/b\n", {"memory/a/memory.limit_in_bytes": "1000", "memory/memory.limit_in_bytes": "9" * 13}),
    ],
)
def test_the_host_limit_is_that_of_the_tightest_control_group(tmp_path: Path, line: str, files: dict) -> None:
    (tmp_path / "cgroup").write_text(line)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert host_limit_bytes(tmp_path / "cgroup", tmp_path) == 1000
    assert host_limit_bytes(tmp_path / "absent", tmp_path) == psutil.virtual_memory().total


def test_salt_is_refused_with_the_bytes_of_an_accumulator_a_trajectory() -> None:
    settings = {"salt__amplification": 1.0, "schedule": "sync"}
    need = exact_bytes(planned(**settings))
    check_memory_fits(planned(limits={"host_limit_bytes": need}, **settings))
    with pytest.raises(ConfigError) as refused:
        check_memory_fits(planned(limits={"host_limit_bytes": need - 1}, **settings))
    assert "64 accumulators take" in refused.value.seen, "8 groups of 8, under every schedule"
    assert "salt.amplification = 0" in refused.value.remedy and "schedule = 'sync'" not in refused.value.remedy
    check_memory_fits(planned(limits={"host_limit_bytes": need - 1}, schedule="sync"))
