"""Ctrl-C and SIGTERM at moments spread over a run under plain torchrun: what it says, what it leaves, how it goes on.

    python tests/integration/interruptions.py [--moments 10] [--seed 0]      prints a row per signal and moment

Ctrl-C is SIGINT to the whole process group, as a terminal sends it; SIGTERM is for torchrun, as a batch system does.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from jobs import ROOT, alive

from megathunder.checkpoint.folder import newest
from megathunder.metrics.row import read_rows

UPDATES, LIMIT_S = 3, 90.0
SETTINGS = {"run.updates": UPDATES, "run.groups_per_update": 4, "run.checkpoint_every": 1, "run.evaluate_every": 2}
SETTINGS |= {"run.progress": "false", "tasks.heldout": 8, "run.name": "run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one interrupted run left."""

    signal: str
    after_s: float
    status: int
    ended_in_s: float
    output: str
    began: bool  # whether a rank was there: before, torchrun alone answers
    left: list[str]
    updates: int
    checkpoint: Path | None
    report: bool

    def faults(self) -> list[str]:
        """What is not as documented; empty where all is."""
        found = [f"left running: {name}" for name in self.left]
        finished = self.updates == UPDATES
        said = [line for line in self.output.splitlines() if self.said_so(line)]
        if self.began and not said and not finished:
            found.append("no line of ours says how it ended")
        if self.status == 0 and not finished and self.signal == "SIGINT":
            found.append("status 0 of a run that was interrupted")
        if self.ended_in_s > 40:
            found.append(f"took {self.ended_in_s:.0f} s to end")
        if self.signal == "SIGINT" and self.updates and not self.report:
            found.append("no report of the updates that were taken")
        return found

    @staticmethod
    def said_so(line: str) -> bool:
        words = ("interrupted after", "interrupted before", "nothing was trained", "stopped after", "rank 0 has died")
        return any(word in line for word in words)


def launch(folder: Path, *more: str) -> tuple[subprocess.Popen, Path]:
    """A small run under plain torchrun, in a process group of its own, and its log."""
    words = [f"--{key}={value}" for key, value in SETTINGS.items()] + [f"--run.folder={folder}", *more]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["tools/train.py", "--config", "examples/shell_grpo.toml", *words]
    log = folder / f"{time.monotonic_ns()}.log"
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return started, log


def is_rank(process: psutil.Process) -> bool:
    """Whether torchrun has started it as a rank."""
    try:
        return bool(process.environ().get("RANK"))
    except psutil.Error:
        return False


def interrupt(folder: Path, number: signal.Signals, after_s: float) -> Outcome:
    """Start a run, send it the signal `after_s` later, wait for its end."""
    process, log = launch(folder)
    deadline, family = time.monotonic() + after_s, {}
    ranks: set[int] = set()
    while time.monotonic() < deadline and process.poll() is None:
        family |= {p.pid: p for p in psutil.Process(process.pid).children(recursive=True)}
        ranks |= {pid for pid, p in family.items() if is_rank(p)}
        time.sleep(0.1)
    began = time.monotonic()
    if process.poll() is None:
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    status = process.wait(LIMIT_S)
    ended = time.monotonic() - began
    time.sleep(0.5)
    run = folder / "run"
    metrics = run / "metrics.jsonl"
    return Outcome(
        signal=number.name,
        after_s=after_s,
        status=status,
        ended_in_s=ended,
        output=log.read_text(errors="replace"),
        began=bool(ranks),
        left=[p.name() for p in family.values() if alive(p)],
        updates=len(read_rows(metrics)) if metrics.exists() else 0,
        checkpoint=newest(run / "checkpoints", lambda _: None),
        report=(run / "report.html").exists(),
    )


def resume(folder: Path) -> tuple[int, int]:
    """Status of the resumed run, and the updates that it has then."""
    process, _ = launch(folder, "--run.resume")
    status = process.wait(LIMIT_S)
    return status, len(read_rows(folder / "run" / "metrics.jsonl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as whole:
        began = time.monotonic()
        assert launch(Path(whole))[0].wait(180) == 0
        length = time.monotonic() - began
    bad = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        for moment in range(arguments.moments):
            with tempfile.TemporaryDirectory() as folder:
                outcome = interrupt(Path(folder), number, length * (moment + 0.5) / arguments.moments)
                faults = outcome.faults()
                if outcome.checkpoint and outcome.updates < UPDATES and resume(Path(folder)) != (0, UPDATES):
                    faults.append("did not go on")
            bad += bool(faults)
            print(
                f"{outcome.signal:8} at {outcome.after_s:5.1f} s: status {outcome.status}, "
                f"ended in {outcome.ended_in_s:4.1f} s, "
                f"{outcome.updates} updates, {outcome.checkpoint.name if outcome.checkpoint else 'no checkpoint'}: "
                f"{'; '.join(faults) or 'as documented'}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
