"""A training job started by a tool: its settings as a file, torchrun over `tools/train.py` or
`benchmarks/alternating.py`, and the folder it wrote.

Called by tools/compare.py, tools/replay.py and benchmarks/learning_curves.py. Raises JobFailed where the job ends with
another status than 0, JobStopped where the tool was told to end meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.comparison.alternation import Alternation
from megathunder.config import Config
from megathunder.config.learner import LearnerConfig
from megathunder.config.load import load_config
from megathunder.config.ranges import check_ranges
from megathunder.config.toml import read_config, to_toml
from megathunder.errors import MegathunderError, UserError
from megathunder.metrics.run_folder import RunFolder
from megathunder.process_exit import INTERRUPTED
from megathunder.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
TRAIN, ALTERNATING = ROOT / "tools" / "train.py", ROOT / "benchmarks" / "alternating.py"
TERMINAL_S = 5.0
DECIDED = frozenset(("schedule", "run.name", "run.folder", "run.updates", "run.resume", "run.overwrite"))
"""What a tool settles itself, so that it finds what it asked for."""


class JobFailed(MegathunderError):
    """The job's own lines say why."""


class JobStopped(MegathunderError):
    """This process was told to end by signal `number`, and the job has ended first. `folder` is what it wrote, as far
    as it got; None: it ended before its run began."""

    def __init__(self, number: int, folder: RunFolder | None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number, self.folder = number, folder

    def status(self, *, kept: bool) -> int:
        """The tool's exit status, as a run's: 130 after Ctrl-C; after SIGTERM 0 if what there was is `kept`, else 1."""
        return INTERRUPTED if self.number == signal.SIGINT else int(not kept)


def run_job(
    config: Config, *, ranks: int, settings: Sequence[str] = (), alternation: Alternation | None = None
) -> RunFolder:
    """Run `config` with `settings` (command-line words) on `ranks` learner ranks; the folder of the finished run.
    With `alternation` it is a measurement, otherwise training.
    Before it starts: UserError where a number is out of its range, SystemExit (2) for a setting that there is not."""
    refuse_decided(settings)
    written = RunFolder(Path(config.run.folder).absolute() / config.run.name)
    before = _age(written.config)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(to_toml(config))
        check_ranges(load_config(["--config", str(file), *settings]))
        command = [sys.executable]
        if ranks > 1:  # port 0 takes a free one, so that jobs may run side by side
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        program = [str(TRAIN)]
        if alternation:
            alternation.write(Path(folder) / "alternation.json")
            program = [str(ALTERNATING), "--alternation", str(Path(folder) / "alternation.json")]
        status, number = _wait_for([*command, *program, "--config", str(file), *settings])
    if number:
        raise JobStopped(number, None if _age(written.config) == before else written)
    if status:
        raise JobFailed(f"the job {config.run.name!r} ended with status {status}; its lines above say why")
    read_config(written.config)
    return written


def refuse_decided(settings: Sequence[str]) -> None:
    """Raise UserError where `settings` say what the tool that starts the job says."""
    for word in settings:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in DECIDED:
            raise UserError(
                f"{word}: settled by this tool",
                expected=f"settings of the workload, none of {', '.join(sorted(DECIDED))}",
                remedy="use the tool's own options (--help), or change the configuration file",
            )


def _age(file: Path) -> int:
    """When a run last wrote its settings, which it does as it begins; 0: never."""
    return file.stat().st_mtime_ns if file.exists() else 0


def _wait_for(command: Sequence[str]) -> tuple[int, int]:
    """(status of `command`, the signal that this process got meanwhile, or 0). The command never outlives this process:
    SIGTERM is passed on and its end waited for, a second one kills it. Ctrl-C reaches both; if only this process got
    SIGINT, the command is told after `TERMINAL_S`."""
    job = subprocess.Popen(command, preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    told: list[int] = []

    def stop(number: int, _: object) -> None:
        job.send_signal(signal.SIGKILL if told else number)
        told.append(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        status = job.wait()
    except KeyboardInterrupt:
        told.append(int(signal.SIGINT))
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(TERMINAL_S)
        job.send_signal(signal.SIGINT)  # nothing where it has ended
        status = job.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    return status, told[0] if told else 0


def replay_config(run: Path, **changes: object) -> Config:
    """The settings of recorded run `run`, changed to replay it; `changes` are fields of its [run] section.

    A recorded comparison took steps of size 0; a replay that takes real ones gets the default step size."""
    config = RunFolder(run).read_config()
    learner = config.learner
    if not learner.learning_rate:
        learner = dataclasses.replace(learner, learning_rate=LearnerConfig().learning_rate)
    plain = dataclasses.replace(config.run, evaluate_every=0, resume=False, overwrite=True, **changes)
    metrics = dataclasses.replace(config.metrics, sinks=(), report=False, report_every=0)
    opd = dataclasses.replace(config.opd, teacher="")  # its scores are recorded
    return dataclasses.replace(config, run=plain, learner=learner, metrics=metrics, opd=opd)
