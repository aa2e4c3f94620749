"""Data, reward, environment and agent of one's own: the examples train on one server, and mistakes are told at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.jobs import ROOT, Job, job

PEERS = ROOT / "tests" / "unit" / "tasks" / "peer_formats"
STUDENT = ROOT / "examples" / "policies" / "student"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with the student, for all runs of this file."""
    folder = tmp_path_factory.mktemp("server")
    words = [sys.executable, "tools/serve.py", f"--learner.model={STUDENT}", "--announce", str(folder / "up")]
    process = subprocess.Popen(
        [*words, "--logs", str(folder)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    deadline_s = time.monotonic() + 240
    while not (announced := [*(folder / "up").glob("*")]):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.1)
    yield announced[0].read_text().strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def trained(folder: Path, name: str, config: str, server: str, **settings: object) -> Job:
    """A finished run of two updates on `server`."""
    changes = {"run.updates": 2, "run.groups_per_update": 4, "rollout.urls": server, **settings}
    with job(folder, name, config=config, **changes) as run:
        assert run.end(240) == 0, run.output()
    assert len(run.rows()) == changes["run.updates"]
    return run


def records(run: Job, update: int = 0) -> list[dict]:
    return [json.loads(line) for line in (run.run / "trajectories" / f"update_{update:05d}.jsonl").open()]


def stepped(run: Job) -> bool:
    return any(row["stepped"] for row in run.rows())


def test_rows_and_a_function_of_ones_own_train(tmp_path: Path, server: str) -> None:
    run = trained(tmp_path, "reward", "own_reward/own_reward", server)
    assert stepped(run)
    for record in records(run):
        assert set(record["reward_parts"]) == {"right", "close"}
        assert record["reward"] == pytest.approx(sum(record["reward_parts"].values()))
        assert record["trajectory"]["turns"] == 1


def test_an_environment_with_steps_trains_over_several_turns(tmp_path: Path, server: str) -> None:
    run = trained(tmp_path, "steps", "guess_number/steps", server)
    assert stepped(run)
    assert max(record["trajectory"]["turns"] for record in records(run)) == 4
    assert any("higher" in record["text"][0] or "lower" in record["text"][0] for record in records(run))


def test_an_environment_with_tools_shows_them_to_the_policy(tmp_path: Path, server: str) -> None:
    run = trained(tmp_path, "tools", "guess_number/tools", server)
    assert all('"name": "guess"' in record["text"][0] and record["reward"] == 0.0 for record in records(run))


def test_an_agent_of_ones_own_trains_with_its_own_reward(tmp_path: Path, server: str) -> None:
    run = trained(tmp_path, "agent", "own_agent/own_agent", server)
    assert stepped(run)
    assert {record["reward"] for record in records(run)} == {0.0, 1.0}


def test_rows_of_each_peer_train_unchanged(tmp_path: Path, server: str) -> None:
    for name in ("slime", "verl", "trl"):
        settings = {
            "run.updates": 1,
            "tasks.path": PEERS / f"{name}.jsonl",
            "tasks.heldout": 0,
            "reward.function": f"{ROOT}/tests/integration/peer_rewards.py:{name}",
        }
        run = trained(tmp_path, name, "own_reward/own_reward", server, **settings)
        assert stepped(run), run.output()


@pytest.mark.parametrize("package", ["reasoning_gym", "gymnasium", "textarena"])
def test_environments_of_other_packages_train(tmp_path: Path, server: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (MEGATHUNDER_ENVIRONMENTS=1 bash tools/setup.sh)")
    run = trained(tmp_path, package, package, server)
    assert all(record["reward"] is not None for record in records(run))


def test_a_reward_that_raises_ends_the_run_with_its_traceback(tmp_path: Path, server: str) -> None:
    code = tmp_path / "late.py"
    code.write_text("def score(completion, row, trajectory):\n    return row['none'] if completion else 0.0\n")
    changes = {"reward.function": f"{code}:score", "rollout.urls": server}
    with job(tmp_path, "raises", config="own_reward/own_reward", **changes) as run:
        assert run.end(240) == 2
        assert "KeyError: 'none' (3 times)" in run.output() and "late.py" in run.output()


OWN = ROOT / "examples" / "own_reward"
MISTAKES = {
    "file": ({"reward.function": f"{OWN}/absent.py:score"}, "absent.py does not exist"),
    "name": ({"reward.function": f"{OWN}/rewards.py:scor"}, "did you mean 'score'"),
    "path": ({"tasks.path": OWN / "tran.jsonl"}, "did you mean 'train.jsonl'"),
    "hub": ({"tasks.path": "nobody-has/this"}, "tasks.path = 'nobody-has/this'"),
    "environment": ({"tasks.environment": f"{OWN}/rewards.py:score"}, "has the signature"),
    "agent": ({"rollout.agent": f"{OWN}/rewards.py:score"}, "no coroutine function"),
    "source": ({"tasks.source": "tabel"}, "did you mean 'table'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_before_a_run_folder_is_made(tmp_path: Path, case: str) -> None:
    settings, words = MISTAKES[case]
    with job(tmp_path, "mistake", config="own_reward/own_reward", **settings) as run:
        assert run.end(60) == 2
        assert words in run.output(), run.output()
    assert not run.run.exists()
