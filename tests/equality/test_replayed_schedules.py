"""The same recorded trajectories give the same update under every schedule, in any order, on one cell and on two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megathunder.config import Config
from megathunder.config.replay import ReplayConfig
from megathunder.config.toml import to_toml
from megathunder.coordinator.job import replay_config, run_job
from megathunder.metrics.differences import differences
from megathunder.metrics.folder import RunFolder
from megathunder.metrics.row import read_rows
from tests.equality import worlds
from tests.unit.coordinator.recordings import write_update

SCHEDULES = ("sync", "periodic_async", "thundersync")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One recorded update of 4 groups of 4 random trajectories, and the tiny model that is to learn from it."""
    folder = tmp_path_factory.mktemp("recording")
    model = worlds.write_model(folder / "model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config.from_pretrained(model)).float().save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    run = dataclasses.replace(Config().run, groups_per_update=4, group_size=4, progress=False)
    learner = dataclasses.replace(Config().learner, model=str(model), device="cpu")
    streaming = dataclasses.replace(Config().streaming, pack_tokens=512, max_open_groups=2)
    config = dataclasses.replace(Config(), run=run, learner=learner, streaming=streaming)
    (folder / "config.toml").write_text(to_toml(config))
    write_update(RunFolder(folder), 0, groups=4, size=4)
    return folder


def gradients(recording: Path, ranks: int, accumulator: str) -> list[Path]:
    """The gradient of each of SCHEDULES, arrivals shuffled anew for each."""
    replay = ReplayConfig(shuffle_seed=ranks, speed=4.0)
    name = f"{accumulator}_{ranks}"
    config = replay_config(recording, replay, name=name, folder=str(recording / "runs"), updates=len(SCHEDULES))
    run = dataclasses.replace(config.run, alternate=SCHEDULES, alternate_block=1, record_gradients=True)
    learner = dataclasses.replace(config.learner, accumulator=accumulator)
    folder = run_job(dataclasses.replace(config, run=run, learner=learner), ranks=ranks)
    rows = read_rows(folder.metrics)
    assert [row.schedule for row in rows] == list(SCHEDULES)
    assert all(row.contributions_applied == 16 and row.policy_lag_max == 0 for row in rows)
    return [folder.tensors_of("gradients", update) for update in range(len(SCHEDULES))]


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
def test_every_schedule_and_number_of_cells_gives_one_gradient(recording: Path, accumulator: str) -> None:
    found = [file for ranks in (1, 2) for file in gradients(recording, ranks, accumulator)]
    for file in found[1:]:
        gap = differences(found[0], file)
        assert gap.largest < 1e-5, (file, gap.by_kind)
        assert len(gap.by_kind) > 5, "every kind of parameter is there"
        if accumulator == "exact":
            assert gap.identical, file
