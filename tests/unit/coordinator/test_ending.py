"""What a run says when it is told to end, or is ended, before it has trained anything or by something else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_loop import settings

from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.shutdown import ShutdownHandler
from megathunder.launch import CoordinatorProcess, killed
from megathunder.metrics.run_folder import RunFolder
from tools.torchrun import _ranks

ROOT = Path(__file__).parents[3]
NOTHING = "stopped before the first update of this start: nothing was trained"


def ended(folder: Path, parent: int) -> int:
    """The status of work that gets two SIGTERM before there is a run to stop."""

    async def work() -> int:
        ending = ShutdownHandler(asyncio.current_task(), parent, 5.0, RunFolder(folder))  # type: ignore[arg-type]
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            return ending.status()
        return -1

    return asyncio.run(work())


def test_sigterm_before_the_first_update_says_once_that_nothing_was_trained_and_where_the_folder_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ended(tmp_path, os.getppid()) == 0
    assert capfd.readouterr().err == f"{NOTHING}; run folder: {tmp_path}\n"


def test_the_death_of_rank_0_is_told_with_a_way_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ended(tmp_path, parent=-1) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: the learner's rank 0 has died (killed, out of memory?)")
    assert "no checkpoint was saved (run.checkpoint_every); --run.overwrite starts anew" in said


@pytest.mark.parametrize(("ranks", "status"), [("1", 0), ("2", 143)])
def test_sigterm_while_the_program_still_starts_is_told_too(ranks: str, status: int) -> None:
    program = (
        "import os; from megathunder.process_exit import end_on_signals as e; e('runs/x'); os.kill(os.getpid(), 15)"
    )
    environment = {**os.environ, "WORLD_SIZE": ranks, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, f"{NOTHING}; run folder: runs/x\n")


def test_a_run_stopped_in_its_first_update_says_that_nothing_was_trained(tmp_path: Path) -> None:
    said: list[str] = []

    async def save(update: int, version: int, **_: object) -> Path:
        return tmp_path / "checkpoints" / f"update_{update:05d}"

    persistence = SimpleNamespace(save=save, folder=RunFolder(tmp_path), off=False)
    parts = SimpleNamespace(persistence=persistence, monitor=SimpleNamespace(print=said.append))
    run = Coordinator(config=settings(run={"updates": 9}), parts=parts)  # type: ignore[arg-type]
    asyncio.run(run.finish())
    run.update = 3
    asyncio.run(run.finish())
    saved = f"saved {tmp_path}/checkpoints/update_0000"
    assert said == [
        f"{NOTHING}; run folder: {tmp_path}; {saved}0; --run.resume goes on",
        f"stopped after 3 updates; {saved}3; --run.resume goes on",
    ]


@pytest.fixture
def coordinator(tmp_path: Path) -> Callable[[int], CoordinatorProcess]:
    def make(number: int) -> CoordinatorProcess:
        made = object.__new__(CoordinatorProcess)
        made._folder = RunFolder(tmp_path)
        made._process = subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})"])
        return made

    return make


def test_a_killed_coordinator_is_told_with_the_likely_reason_and_a_remedy(
    coordinator: Callable[[int], CoordinatorProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert coordinator(signal.SIGKILL).stop(20.0) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: the coordinator was ended by SIGKILL") and "for want of memory" in said
    assert "\n  remedy:   lower rollout.max_concurrent" in said and str(RunFolder(tmp_path).metrics) in said
    assert "no checkpoint was saved" in said
    crashed = killed(signal.SIGSEGV, RunFolder(tmp_path))
    assert "SIGSEGV" in crashed and "memory" not in crashed and "--run.overwrite" in crashed


RANK = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
pathlib.Path(sys.argv[1]).touch()
time.sleep(float(sys.argv[2]))
sys.exit(7)
"""


@pytest.mark.parametrize(("interrupted", "status"), [(True, 130), (False, 1)])
def test_our_torchrun_ends_without_a_traceback_of_its_own(tmp_path: Path, interrupted: bool, status: int) -> None:
    script, begun = tmp_path / "rank.py", tmp_path / "begun"
    script.write_text(RANK)
    words = ["tools/torchrun.py", "--standalone", "--nproc-per-node", "1", str(script), str(begun)]
    words.append("30" if interrupted else "0")
    job = subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    if interrupted:
        job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=60)
    assert job.returncode == status, said
    assert "Traceback" not in said
    assert interrupted or ("Root Cause" in said and "exitcode  : 7" in said)


LATE = """
import os, signal, torch.distributed.run
from tools.torchrun import run_agent

def job(_):
    def interrupt(*_):
        raise ValueError("in the middle of whatever comes next")
    signal.signal(signal.SIGINT, interrupt)

torch.distributed.run.main = job
status = run_agent([])
os.kill(os.getpid(), signal.SIGINT)
raise SystemExit(status)
"""


def test_a_signal_after_the_work_of_torchrun_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_rank_that_has_ended_is_not_taken_for_none_begun() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert _ranks(os.getpid()).get("") == []
    ended.wait()
