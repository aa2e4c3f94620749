"""A server machine: servers are announced while they are healthy, waited for, and taken back with the machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megathunder.rollout.servers.command import WEIGHT_LOADER

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "slurm"
LIMIT_S = 120


def start_machine(folder: Path, *settings: str) -> subprocess.Popen:
    """tools/serve.py with one server of the example policy on this CPU."""
    command = [sys.executable, str(ROOT / "tools" / "serve.py"), "--config", str(ROOT / "examples" / "shell_grpo.toml")]
    command += ["--announce", str(folder / "servers"), "--logs", str(folder / "logs"), *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_healthy(folder: Path, count: int, limit_s: int) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / "wait_healthy.sh"), str(folder / "servers"), str(count), str(limit_s)]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, Path]]:
    folder = tmp_path_factory.mktemp("shared")
    process = start_machine(folder)
    yield process, folder
    if process.poll() is None:
        process.kill()
    process.wait()


@pytest.mark.slow
def test_a_healthy_server_is_announced_and_can_be_published_to(machine: tuple[subprocess.Popen, Path]) -> None:
    _, folder = machine
    waited = wait_healthy(folder, 1, LIMIT_S)
    assert waited.returncode == 0, waited.stderr
    (url,) = waited.stdout.split()
    info = json.load(urllib.request.urlopen(url + "/server_info", timeout=10))
    assert info["custom_weight_loader"] == [WEIGHT_LOADER]


@pytest.mark.slow
def test_a_learner_does_not_start_without_its_servers(machine: tuple[subprocess.Popen, Path]) -> None:
    _, folder = machine
    waited = wait_healthy(folder, 2, 3)
    assert waited.returncode == 1 and waited.stdout == ""
    assert "1 of 2 servers announced" in waited.stderr


@pytest.mark.slow
def test_a_server_that_dies_is_taken_back_and_announced_again(machine: tuple[subprocess.Popen, Path]) -> None:
    process, folder = machine
    announced = folder / "servers" / "127.0.0.1-0"
    leader = next(
        c for c in psutil.Process(process.pid).children(recursive=True) if "sglang.launch_server" in c.cmdline()
    )
    leader.kill()
    assert _becomes(lambda: not announced.exists(), 30)
    assert _becomes(announced.exists, LIMIT_S)


@pytest.mark.slow
def test_a_machine_that_is_told_to_stop_leaves_nothing(machine: tuple[subprocess.Popen, Path]) -> None:
    process, folder = machine
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0, process.stderr.read()
    assert list((folder / "servers").iterdir()) == []
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_a_server_others_can_reach_needs_a_key(tmp_path: Path) -> None:
    process = start_machine(tmp_path, "--rollout.host", "0.0.0.0")
    assert process.wait(60) == 2
    assert "set rollout.api_key" in process.stderr.read()


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir() if path.suffix != ".md"))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)


def _becomes(condition: object, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False
