"""Sweeps: their parameters are settings, every point of the grid is legal, W&B's own file holds every row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megathunder.config.checks import check_plan
from megathunder.config.load import load_config
from megathunder.config.toml import settings
from megathunder.metrics.row import MetricsRow

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "ablations"
sys.path.insert(0, str(FOLDER))

import grid
import trial

SWEEPS = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", SWEEPS, ids=lambda path: path.stem)
def test_every_point_of_a_sweep_is_a_legal_run_with_a_folder_of_its_own(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load(file.read_text())
    assert set(sweep["parameters"]) <= set(settings())
    assert sweep["metric"]["name"] in MetricsRow.__struct_fields__
    assert (ROOT / sweep["program"]).is_file()
    points = grid.points(sweep)
    names = set()
    for point in points:
        words = grid.command(sweep, point)
        arguments = words[words.index(sweep["program"]) + 1 :]
        config = load_config(arguments)
        check_plan(config, ranks=1)
        assert config.metrics.wandb_mode == "offline" and config.rollout.device in ("cpu", "auto")
        for name, value in point.items():
            section, _, key = name.rpartition(".")
            assert getattr(getattr(config, section) if section else config, key) == value
        names.add(trial.name_of(arguments))
    assert len(names) == len(points)


def test_the_sweep_crosses_schedule_objective_and_group_size() -> None:
    sweep = yaml.safe_load((FOLDER / "schedule_objective_group.yaml").read_text())
    points = grid.points(sweep)
    assert len(points) == 3 * 2 * 3
    assert {"schedule": "sync", "objective": "opd", "run.group_size": 16} in points


def test_a_grid_prints_the_commands_that_an_agent_would_run() -> None:
    command = [sys.executable, str(FOLDER / "grid.py"), str(SWEEPS[0]), "--list", "--run.updates", "2"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(listed) == 18
    assert listed[0].endswith("base.toml --schedule=sync --objective=grpo --run.group_size=4 --run.updates 2")


def test_a_trial_trains_under_the_name_of_what_it_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    varied = ["--config", "c.toml", "--schedule=sync", "--run.group_size=4", "--run.updates", "2"]
    assert trial.name_of(varied) == "schedule-sync_group_size-4"
    assert trial.name_of(["--grpo.clip=4", "--schedule=sync"]) != trial.name_of(["--schedule=sync", "--grpo.clip=4"])
    assert trial.name_of(["--run.group_size=4"]) != trial.name_of(["--run.groups_per_update=4"])
    monkeypatch.setenv(trial.SWEEP, "one")
    first = trial.name_of(varied)
    monkeypatch.setenv(trial.SWEEP, "another")
    assert first == "one_schedule-sync_group_size-4" != trial.name_of(varied)
    monkeypatch.delenv(trial.SWEEP)
    words = [
        sys.executable,
        str(FOLDER / "trial.py"),
        "--config",
        str(FOLDER / "base.toml"),
        "--plan",
        "--schedule=sync",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=environment).stdout
    assert "plan of schedule-sync" in shown
