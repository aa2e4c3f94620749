"""Training jobs as real processes: started, watched, hurt, and their process tree afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SMALL = {
    "run.updates": 3,
    "run.groups_per_update": 3,
    "run.group_size": 4,
    "run.evaluate_every": 0,
    "run.progress": "false",
    "tasks.size": 64,
    "metrics.report": "false",
}


class Job:
    """A job in `folder`; `process` is what a person would have started."""

    def __init__(self, folder: Path, name: str, process: subprocess.Popen, log: Path) -> None:
        self.run, self.process, self.log = folder / name, process, log
        self.seen: dict[int, psutil.Process] = {}

    def rows(self) -> list[dict]:
        path = self.run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object], limit_s: float = 120.0) -> None:
        """Until `condition` holds; fails with the job's output when it ends or takes too long."""
        deadline = time.monotonic() + limit_s
        while not condition():
            self.family()
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output()}"
            assert time.monotonic() < deadline, f"not within {limit_s} s:\n{self.output()}"
            time.sleep(0.05)

    def wait_for_update(self, number: int) -> None:
        """Into the middle of update `number`: its rollouts run."""
        self.wait_for(lambda: len(self.rows()) >= number and self.named("sglang.launch_server"))
        time.sleep(0.3)

    def end(self, limit_s: float) -> int:
        """The exit status; fails when the job takes longer than `limit_s`."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {limit_s} s:\n{self.output()}") from None

    def family(self) -> list[psutil.Process]:
        """Every process of the job; those seen are remembered, since orphans lose their parent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.process.pid)
            self.seen |= {process.pid: process for process in [top, *top.children(recursive=True)]}
        return [process for process in self.seen.values() if alive(process)]

    def named(self, word: str) -> list[psutil.Process]:
        """Processes with `word` on their command line, eldest first."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(word in part for part in process.cmdline()):
                    found.append(process)
        return sorted(found, key=lambda process: (process.create_time(), process.pid))

    def rank(self, number: int) -> psutil.Process:
        """A learner rank under torchrun."""
        for process in self.named("tools/train.py"):
            if process.pid != self.process.pid and process.environ().get("RANK") == str(number):
                return process
        raise AssertionError(f"no rank {number}:\n{self.output()}")

    def orphans(self, limit_s: float = 5.0) -> list[str]:
        """What is left of the family `limit_s` after its end."""
        _, left = psutil.wait_procs(self.family(), timeout=limit_s)
        return [f"{p.pid} {' '.join(p.cmdline()[:4])}" for p in left if alive(p)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TORCHRUN = ("-m", "torch.distributed.run")
STOPPABLE = ("tools/torchrun.py",)


def command(ranks: int, launcher: Sequence[str] = TORCHRUN) -> list[str]:
    """`python tools/train.py`, or torchrun over it."""
    run = [*launcher, "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *run, "tools/train.py"]


@contextlib.contextmanager
def job(
    folder: Path,
    name: str,
    *,
    ranks: int = 0,
    launcher: Sequence[str] = TORCHRUN,
    config: str = "shell_grpo",
    **settings: object,
) -> Iterator[Job]:
    """A running job (`ranks` 0: without torchrun); killed with all its processes on the way out."""
    words = [f"--{key}={value}" for key, value in {**SMALL, **settings}.items()]
    log = folder / f"{name}.{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *command(ranks, launcher),
                "--config",
                f"examples/{config}.toml",
                f"--run.folder={folder}",
                f"--run.name={name}",
            ]
            + words,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
    started = Job(folder, name, process, log)
    try:
        yield started
    finally:
        for member in started.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
