"""Two learner machines, each one torchrun agent with an address of its own, train together with a real server.

Both agents run here: one is 127.0.0.2, the other 127.0.0.3, so that what listens on 127.0.0.1 alone is not reached.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megathunder.checkpoint.folder import newest
from megathunder.checkpoint.state import read_state
from megathunder.config import Config
from megathunder.errors import ConfigError
from megathunder.launch import Ranks
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.spans import read_spans

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0


def start_agent(
    machine: int, port: int, output: Path, *settings: str, per_machine: int = 1, hidden: Path | None = None
) -> subprocess.Popen:
    """The torchrun agent of machine 0 or 1; machine 0 serves the rendezvous. It sees nothing of the folder `hidden`."""
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{hidden}" && exec "$@"', "sh"] if hidden else []
    command = [*apart, sys.executable, str(ROOT / "tools" / "torchrun.py"), "--nnodes", "2"]
    command += ["--nproc-per-node", str(per_machine)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.2:{port}", "--rdzv-id", "two"]
    command += ["--rdzv-conf", f"is_host={int(machine == 0)}", "--local-addr", f"127.0.0.{2 + machine}"]
    command += [str(ROOT / "tools" / "train.py"), "--config", str(ROOT / "examples" / "shell_grpo.toml"), *settings]
    with output.open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return probe.getsockname()[1]


def listening(process: subprocess.Popen) -> set[str]:
    """Addresses at which the coordinator among the agent's descendants listens."""
    found = set()
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "megathunder.coordinator.process" in child.cmdline():
                found |= {c.laddr.ip for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


@pytest.mark.slow
def test_two_machines_take_exact_updates_together_and_end_well_when_told_to_stop(tmp_path: Path) -> None:
    port, folder = free_port(), RunFolder(tmp_path / "two")
    settings = ["--run.folder", str(tmp_path), "--run.name", "two", "--run.updates", "50", "--run.evaluate_every", "0"]
    settings += ["--run.groups_per_update", "8", "--run.group_size", "4", "--streaming.pack_tokens", "512"]
    settings += ["--tasks.latency_scale", "0.2", "--run.no-progress"]
    logs = [tmp_path / f"agent{machine}.log" for machine in range(2)]
    agents = [start_agent(machine, port, logs[machine], *settings) for machine in range(2)]
    seen: set[str] = set()
    told = False
    try:
        deadline = time.monotonic() + LIMIT_S
        while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
            if agents[0].poll() is None:
                seen |= listening(agents[0])
            if not told and folder.metrics.exists() and len(read_rows(folder.metrics)) >= 2:
                told = True  # as a batch system does: every machine's launcher
                for agent in agents[::-1]:
                    agent.send_signal(signal.SIGTERM)
            time.sleep(0.5)
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGINT)
    said = "\n".join(log.read_text() for log in logs)
    assert [agent.wait(30) for agent in agents] == [0, 0], said
    assert "127.0.0.2" in seen, f"the coordinator listened on {seen}"
    assert read_state(newest(folder.checkpoints, pytest.fail)).update >= 2
    rows = read_rows(folder.metrics)
    assert [row.update for row in rows[:2]] == [0, 1]
    for row in rows:
        assert row.policy_lag_max == 0 and row.contributions_applied + row.contributions_dropped == 32
        assert row.step_wall_s == pytest.approx(row.rollout_s + row.tail_s + row.suffix_s)
        assert row.engine_learner_logprob_diff_max < 1e-3
    assert any(row.stepped for row in rows)
    lanes = {span.lane for span in read_spans(folder.events) if span.name == "differentiate"}
    assert len(lanes) == 2, f"both machines' cells take work, not {lanes}"


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_run_folder_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    settings = ["--run.folder", str(tmp_path / "runs")]
    logs, statuses = run_both(tmp_path, settings, settings, hidden=tmp_path / "runs")
    assert 0 not in statuses
    assert f"does not see {tmp_path / 'runs' / 'shell_grpo' / 'config.toml'}" in logs[0], logs[0]
    assert "set run.folder to one on a shared file system" in logs[0]


@pytest.mark.slow
def test_both_machines_end_within_seconds_of_a_refusal_and_say_why(tmp_path: Path) -> None:
    (tmp_path / "shell_grpo").mkdir()
    (tmp_path / "shell_grpo" / "metrics.jsonl").write_text("{}\n")
    began = time.monotonic()
    logs, statuses = run_both(tmp_path, ["--run.folder", str(tmp_path)], ["--run.folder", str(tmp_path)])
    assert 0 not in statuses and time.monotonic() - began < 45.0
    for log in logs:
        assert "--run.overwrite" in log, log


@pytest.mark.slow
def test_both_machines_train_with_the_settings_of_rank_0(tmp_path: Path) -> None:
    short = ["--run.folder", str(tmp_path), "--run.updates", "1", "--run.evaluate_every", "0", "--run.no-progress"]
    short += ["--run.groups_per_update", "4", "--run.group_size", "4", "--tasks.latency_scale", "0.1"]
    logs, statuses = run_both(tmp_path, short, [*short, "--learner.learning_rate", "0.3"], limit_s=LIMIT_S)
    assert statuses == [0, 0], logs
    assert "the command line of this machine is not that of rank 0" in logs[1]
    assert len(read_rows(RunFolder(tmp_path / "shell_grpo").metrics)) == 1


def run_both(
    tmp_path: Path, first: list[str], second: list[str], *, hidden: Path | None = None, limit_s: float = 90.0
) -> tuple[list[str], list[int]]:
    """What both machines printed, and their statuses; `hidden` is out of the second one's sight."""
    port, logs = free_port(), [tmp_path / f"agent{machine}.log" for machine in range(2)]
    agents = [start_agent(0, port, logs[0], *first), start_agent(1, port, logs[1], *second, hidden=hidden)]
    try:
        statuses = [agent.wait(limit_s) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
    return [log.read_text() for log in logs], statuses


def test_the_coordinator_listens_where_the_other_machines_reach_it() -> None:
    alone = Ranks(rank=0, world=8, local_rank=0, machines=1, master="node7")
    assert alone.listening_address(Config()) == "127.0.0.1"
    several = Ranks(rank=0, world=8, local_rank=0, machines=2, master="127.0.0.2")
    assert several.listening_address(Config()) == "127.0.0.2" == several.reachable_name(Config())
    with pytest.raises(ConfigError, match="no address here"):
        Ranks(rank=0, world=8, local_rank=0, machines=2, master="no-such-machine.invalid").listening_address(Config())
