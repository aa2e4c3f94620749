"""The scripts of a server machine: servers are announced when healthy, waited for, and taken back when one ends.

`python` is one that serves /health a moment after it is started in the place of SGLang; the scripts are the real ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megathunder.rollout.command import choose_port

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "slurm"
STANDIN = """#!{python}
import http.server, os, sys, time
if sys.argv[1:3] != ["-m", "sglang.launch_server"]:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
options = dict(zip(sys.argv[3:-1], sys.argv[4:]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
time.sleep(0.5)
with open(os.environ["STARTED"], "a") as log:
    log.write(" ".join(sys.argv[3:]) + "\\n")
http.server.HTTPServer((options["--host"], int(options["--port"])), Health).serve_forever()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path, dict[str, str]]]:
    """serve_node.sh with two servers of two GPUs each, its shared folder and its environment."""
    standin = tmp_path / "bin" / "python"
    standin.parent.mkdir()
    standin.write_text(STANDIN.replace("{python}", sys.executable))
    standin.chmod(0o755)
    (tmp_path / "servers").mkdir()
    environment = {**os.environ, "PATH": f"{standin.parent}:{os.environ['PATH']}", "STARTED": str(tmp_path / "started")}
    environment |= {"MODEL": "m", "MEGATHUNDER_SHARED": str(tmp_path), "MEGATHUNDER_API_KEY": "k", "GPUS": "4"}
    environment |= {"GPUS_PER_SERVER": "2", "PORT": str(choose_port("127.0.0.1", 0)), "SERVER_HOST": "127.0.0.1"}
    script = ["bash", str(SCRIPTS / "serve_node.sh"), "--mem-fraction-static", "0.85"]
    process = subprocess.Popen(script, env=environment, start_new_session=True)
    yield process, tmp_path, environment
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_healthy(folder: Path, count: int, limit_s: int, environment: dict[str, str]) -> subprocess.CompletedProcess:
    command = ["bash", str(SCRIPTS / "wait_healthy.sh"), str(folder / "servers"), str(count), str(limit_s)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_servers_are_announced_when_they_are_healthy_and_taken_back_when_one_ends(
    machine: tuple[subprocess.Popen, Path, dict[str, str]],
) -> None:
    process, folder, environment = machine
    waited = wait_healthy(folder, 2, 30, environment)
    port = int(environment["PORT"])
    assert waited.stdout.split() == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"], waited.stderr
    started = sorted((folder / "started").read_text().splitlines())
    assert [("--base-gpu-id 0" in line, "--base-gpu-id 2" in line) for line in started] in (
        [(True, False), (False, True)],
        [(False, True), (True, False)],
    )
    assert all("--tp-size 2" in line and "--mem-fraction-static 0.85" in line for line in started)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout
    os.kill(int(children.split()[0]), signal.SIGKILL)
    assert process.wait(20) == 1
    assert list((folder / "servers").iterdir()) == []


def test_a_learner_does_not_start_without_its_servers(machine: tuple[subprocess.Popen, Path, dict[str, str]]) -> None:
    _, folder, environment = machine
    started = time.monotonic()
    waited = wait_healthy(folder, 3, 4, environment)
    assert waited.returncode == 1 and waited.stdout == ""
    assert "2 of 3 servers announced" in waited.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPTS.iterdir() if path.suffix != ".md"))
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)
