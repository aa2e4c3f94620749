"""The same recorded trajectories give the same update under every schedule, in any order, on one cell and on two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.comparison.alternation import Alternation, Recording, tensor_file
from benchmarks.comparison.differences import differences
from benchmarks.comparison.job import replay_config, run_job
from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder
from tests.equality import worlds
from tests.unit.coordinator.recordings import write_update

SCHEDULES = ("sync", "periodic_async", "thundersync")
RELEASES = ("thundersync/turn_forward", "thundersync+content_ready")
OPD = ("sync", "thundersync", "thundersync/turn", "thundersync/turn_forward")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = worlds.write_model(tmp_path_factory.mktemp("model"))
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def recording(folder: Path, model: Path, objective: str) -> Path:
    """One recorded update of 4 groups of 4 random trajectories; the teacher's scores come late and out of step."""
    run = dataclasses.replace(Config().run, groups_per_update=4, group_size=4, progress=False)
    learner = dataclasses.replace(Config().learner, model=str(model), device="cpu")
    streaming = dataclasses.replace(Config().streaming, pack_tokens=512, max_open_groups=2)
    config = dataclasses.replace(Config(), objective=objective, run=run, learner=learner, streaming=streaming)
    (folder / "config.toml").write_text(to_toml(config))
    write_update(RunFolder(folder), 0, groups=4, size=4, scored=objective == "opd")
    return folder


def gradients(recorded: Path, names: tuple[str, ...], ranks: int, accumulator: str) -> list[Path]:
    """The gradient of each of `names`, arrivals shuffled anew for each."""
    replay = Recording(run=str(recorded), shuffle_seed=ranks, speed=4.0)
    config = replay_config(recorded, name=f"{accumulator}_{ranks}", folder=str(recorded / "runs"), updates=len(names))
    config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, accumulator=accumulator))
    alternation = Alternation(schedules=names, recording=replay, keep=("gradients",))
    folder = run_job(config, ranks=ranks, alternation=alternation)
    rows = read_rows(folder.metrics)
    assert [row.schedule for row in rows] == list(names)
    assert all(row.stepped and row.contributions_dropped == 0 and row.policy_lag_max == 0 for row in rows)
    assert len({(row.contributions_applied, row.trained_tokens) for row in rows}) == 1
    assert [row.loss for row in rows] == pytest.approx([rows[0].loss] * len(rows), rel=1e-3, abs=1e-5), "one objective"
    return [tensor_file(folder.path, "gradients", update) for update in range(len(names))]


def assert_one_gradient(found: list[Path], *, identical: bool = False) -> None:
    for file in found[1:]:
        gap = differences(found[0], file)
        assert gap.largest < 1e-5, (file, gap.by_kind)
        assert len(gap.by_kind) > 5, "every kind of parameter is there"
        assert gap.identical or not identical, file


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
def test_every_schedule_and_number_of_cells_gives_one_gradient(tmp_path: Path, model: Path, accumulator: str) -> None:
    recorded = recording(tmp_path, model, "grpo")
    # A prefix's keys and values are rounded as they are cached, so only whole trajectories are equal to the bit.
    names = SCHEDULES if accumulator == "exact" else SCHEDULES + RELEASES
    found = [file for ranks in (1, 2) for file in gradients(recorded, names, ranks, accumulator)]
    assert_one_gradient(found, identical=accumulator == "exact")


def test_every_release_of_distillation_gives_one_gradient(tmp_path: Path, model: Path) -> None:
    recorded = recording(tmp_path, model, "opd")
    assert_one_gradient(gradients(recorded, OPD, 2, "fp32"))
