"""One of two servers is killed in the middle of an update, and in the middle of a publication: the run takes every
planned update, with every trajectory accounted for once, and says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
UPDATES, TRAJECTORIES = 6, 16
KILLER = '''
import sys

if sys.argv and sys.argv[0].endswith("train.py"):
    import os, pathlib, signal
    import psutil
    from megathunder.publish.group import Pairs

    whole, calls = Pairs.broadcast, 0

    async def broadcast(self, server, data):
        """The fifth broadcast to the second server finds it dead: its process group is killed in mid-publication."""
        global calls
        if server.name == "rollout-1":
            calls += 1
            if calls == 5:
                port = server.url.rpartition(":")[2]
                for process in psutil.process_iter(["cmdline"]):
                    line = process.info["cmdline"] or []
                    if "sglang.launch_server" in line and port in line:
                        os.killpg(os.getpgid(process.pid), signal.SIGKILL)
                pathlib.Path(os.environ["KILLED"]).touch()
        await whole(self, server, data)

    Pairs.broadcast = broadcast
'''


def rows(folder: Path) -> list[dict]:
    found = folder / "metrics.jsonl"
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def server_of(run: subprocess.Popen, name: str, folder: Path) -> psutil.Process:
    """The leader of the started server `name`, found by the port its log begins with."""
    words = (folder / "logs" / f"{name}.log").read_text().splitlines()[0].split()
    port = words[words.index("--port") + 1]
    family = psutil.Process(run.pid).children(recursive=True)
    return next(p for p in family if "sglang.launch_server" in p.cmdline() and port in p.cmdline())


def test_a_run_survives_servers_killed_in_an_update_and_in_a_publication(tmp_path: Path) -> None:
    hook, killed = tmp_path / "hook", tmp_path / "killed"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(KILLER)
    folder = tmp_path / "deaths"
    line = [sys.executable, "tools/train.py", "--config", "examples/shell_grpo.toml", "--run.folder", str(tmp_path)]
    line += ["--run.name", "deaths", "--run.updates", str(UPDATES), "--run.evaluate_every", "0"]
    line += ["--run.groups_per_update", "4", "--run.group_size", str(TRAJECTORIES // 4)]
    line += ["--rollout.servers", "2", "--publish.bucket_mb", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(hook), str(ROOT))), "KILLED": str(killed)}
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None and len(rows(folder)) < 1:
                time.sleep(0.02)
            victim = server_of(run, "rollout-0", folder)
            os.killpg(os.getpgid(victim.pid), 9)  # update 1 is sampling
            status = run.wait(240)
        finally:
            run.kill()
    said = (tmp_path / "output").read_text()
    assert status == 0, said
    assert killed.exists(), "no server died in a publication"
    found = rows(folder)
    assert [row["update"] for row in found] == list(range(UPDATES)), said
    for row in found:
        assert row["contributions_applied"] + row["contributions_dropped"] == row["trajectories"] == TRAJECTORIES
        assert row["trajectories_lost"] == 0 and row["policy_lag_max"] == 0
        assert row["tokens_by_lag"].keys() == {"0"}
    assert "server rollout-0 is down" in said and "server rollout-1 is down" in said


def test_a_server_whose_scheduler_hangs_is_restarted_and_loses_nothing(tmp_path: Path) -> None:
    """Its HTTP side still says that it is healthy."""
    folder = tmp_path / "hangs"
    line = [sys.executable, "tools/train.py", "--config", "examples/shell_grpo.toml", "--run.folder", str(tmp_path)]
    line += ["--run.name", "hangs", "--run.updates", "3", "--run.evaluate_every", "0", "--run.groups_per_update", "4"]
    line += ["--run.group_size", str(TRAJECTORIES // 4), "--rollout.request_timeout_s", "6"]
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(line, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None and len(rows(folder)) < 1:
                time.sleep(0.02)
            leader = server_of(run, "rollout-0", folder)
            (scheduler,) = (p for p in leader.children(recursive=True) if "scheduler" in p.name())
            scheduler.suspend()
            status = run.wait(150)
        finally:
            run.kill()
    said = (tmp_path / "output").read_text()
    assert status == 0 and "nothing comes out of its scheduler" in said and "is back (start 1)" in said, said
    for row in rows(folder):
        assert row["contributions_applied"] + row["contributions_dropped"] == TRAJECTORIES
        assert "lost" not in row["dropped_by_reason"] and row["policy_lag_max"] == 0
    assert len(rows(folder)) == 3 and not psutil.pid_exists(scheduler.pid)
