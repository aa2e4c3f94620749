"""What is wrong before the start: one error within five seconds that names the remedy, status 2, nothing started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from jobs import ROOT, command

LIMIT_S = 5.0
CONFIG = "--config=examples/shell_grpo.toml"


def unknown_key(folder: Path) -> list[str]:
    file = folder / "mine.toml"
    file.write_text("[learner]\nlerning_rate = 1e-3\n")
    return ["--config", str(file)]


def existing_run(folder: Path) -> list[str]:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("{}\n")
    return [CONFIG, "--run.name=run"]


CASES = {  # name -> (command line, what the error must say)
    "unknown key": (unknown_key, "did you mean 'learning_rate'?"),
    "unknown option": (lambda _: [CONFIG, "--learner.lerning-rate=1"], "did you mean --learner.learning_rate?"),
    "no file": (lambda _: ["--config=absent.toml"], "examples/*.toml"),
    "missing model": (lambda _: [CONFIG, "--learner.model=/absent"], "set learner.model"),
    "group of one": (lambda _: [CONFIG, "--run.group-size=1"], "set run.group_size to 2 or more"),
    "batch above the data": (
        lambda _: [CONFIG, "--tasks.size=3", "--run.groups-per-update=4", "--tasks.wrap=false"],
        "set run.groups_per_update = 3, raise tasks.size to 4",
    ),
    "missing teacher": (lambda _: [CONFIG, "--objective=opd", "--opd.teacher=/absent"], "opd.teacher"),
    "no teacher": (lambda _: [CONFIG, "--objective=opd"], "examples/policies/teacher"),
    "existing run": (existing_run, "--run.resume to continue it, or --run.overwrite"),
    "no bubblewrap": (lambda _: [CONFIG], "apt-get install bubblewrap"),
    "unknown kind": (lambda _: [CONFIG, "--tasks.kinds", "read", "cound"], "some of read, count, sum"),
    "absurd held-out set": (lambda _: [CONFIG, "--tasks.heldout=1000000000"], "at most 8192"),
    "port in use": (lambda _: [CONFIG, "--rollout.port={port}"], "rollout.port = 0"),
    "ranks that do not fit": (lambda _: [CONFIG, "--learner.tensor-parallel=2"], "or a smaller layout"),
}
UNDER_TORCHRUN = ("unknown key", "unknown option", "missing model", "no bubblewrap")


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def ask(folder: Path, case: str, ranks: int) -> tuple[subprocess.CompletedProcess, float]:
    """The finished process, with its output in stdout, and the seconds it took."""
    words, _ = CASES[case]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    if case == "no bubblewrap":
        environment["PATH"] = str(folder)
    with taken_port() as port:
        arguments = [word.format(port=port) for word in words(folder)] + [f"--run.folder={folder}"]
        started_s = time.monotonic()
        done = subprocess.run(
            [*command(ranks), *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    return done, time.monotonic() - started_s


def left_of(folder: Path) -> list[str]:
    """Processes that name the run's folder on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


def startup_s() -> float:
    """What an interpreter and the imports of the tool take here and now: a busy machine is not the tool's fault."""
    started_s = time.monotonic()
    subprocess.run([sys.executable, "tools/train.py", CONFIG, "--plan"], cwd=ROOT, capture_output=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    return time.monotonic() - started_s


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_setting_is_refused_at_once_with_its_remedy(tmp_path: Path, case: str) -> None:
    done, took_s = ask(tmp_path, case, ranks=0)
    assert done.returncode == 2, done.stdout
    assert CASES[case][1] in done.stdout
    assert "Traceback" not in done.stdout
    assert took_s < LIMIT_S or took_s < 4 * startup_s()
    assert not left_of(tmp_path)
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize("case", UNDER_TORCHRUN)
def test_under_torchrun_it_is_said_once_and_quoted_in_the_summary(tmp_path: Path, case: str) -> None:
    done, took_s = ask(tmp_path, case, ranks=2)
    assert done.returncode != 0
    ours, _, summary = done.stdout.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    assert ours.count(CASES[case][1]) == 1 and 'tools/train.py", line' not in ours, done.stdout
    assert "exitcode  : 2" in summary and "error: " in summary
    print(f"{took_s:.1f} s under torchrun")
    assert took_s < LIMIT_S or took_s < 10 * startup_s()
    assert not left_of(tmp_path)


@pytest.mark.parametrize("moment", ["imports", "coordinator"])
def test_an_interrupt_in_the_first_seconds_is_one_line(tmp_path: Path, moment: str) -> None:
    words = [*command(0), CONFIG, f"--run.folder={tmp_path}", "--run.name=run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, start_new_session=True)  # fmt: skip
    if moment == "imports":
        while "msgspec" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
    else:
        while not any("coordinator.process" in line for line in left_of(tmp_path)):
            time.sleep(0.05)
        time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole group
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130 and said.count("\n") == 1 and "interrupted" in said, said
    deadline_s = time.monotonic() + 5.0
    while left_of(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not left_of(tmp_path)


def test_help_may_be_cut_short() -> None:
    done = subprocess.run(
        f"{sys.executable} tools/train.py --help | head -3", shell=True, cwd=ROOT, capture_output=True, text=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "usage: train.py" in done.stdout and done.stderr == ""
