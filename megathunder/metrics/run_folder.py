"""The folder of one run: what lies where, and what starting anew or going on does to it.

    runs/<name>/config.toml     the resolved settings
                metrics.jsonl   one row an update (the truth)
                events.jsonl    spans of rollout and learner
                trajectories/   one file an update: tokens, log-probabilities, text, reward, times
                checkpoints/    update_<n>/ with a COMPLETE marker: updates 0 .. n - 1 are in it
                policy/         the trained policy, a Hugging Face folder
                policies/       update_<n>/: the policy after n updates, at a fixed cadence
                evaluations.jsonl   one line per evaluation on held-out tasks
                attempts/   one file per evaluation: every attempt with its tokens
                resumptions.jsonl   one line per resumption: which settings had changed
                logs/warnings.log   every warning of the coordinator
                timeline.png  report.html

Called by the process that starts a run, after the checks, and by tools that read one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megathunder.config import Config
from megathunder.config.toml import read_config, to_toml
from megathunder.errors import UserError
from megathunder.jsonl import json_lines, whole_bytes

_held: dict[Path, TextIO] = {}  # locks of this process: closed by its end alone


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names of what a run writes; nothing is created by asking."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.png"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def wandb(self) -> Path:
        return self.path / "wandb"

    @property
    def warnings(self) -> Path:
        return self.path / "logs" / "warnings.log"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def policies(self) -> Path:
        return self.path / "policies"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def resumptions(self) -> Path:
        return self.path / "resumptions.jsonl"

    @property
    def unfinished_updates(self) -> Path:
        return self.path / "unfinished_updates.jsonl"

    def policy_after(self, updates: int) -> Path:
        return self.policies / f"update_{updates:05d}"

    def attempts_after(self, updates: int) -> Path:
        return self.attempts / f"update_{updates:05d}.jsonl"

    def trajectories_of(self, update: int) -> Path:
        return self.trajectories / f"update_{update:05d}.jsonl"

    def read_config(self) -> Config:
        """The settings the run was started with."""
        return read_config(self.config)


def start_run(config: Config) -> RunFolder:
    """Make the folder of `config`'s run and write its settings. With `run.overwrite` what an older run wrote goes."""
    folder = RunFolder(Path(config.run.folder) / config.run.name)
    _make(folder.path)
    _hold(folder.path)
    if config.run.overwrite:
        lines = (folder.metrics, folder.evaluations, folder.resumptions, folder.unfinished_updates, folder.warnings)
        lines += (folder.events,)
        for path in (*lines, folder.timeline, folder.report, folder.config, *folder.path.glob("mlflow*")):
            path.unlink(missing_ok=True)
        folders = (folder.trajectories, folder.checkpoints, folder.policy, folder.policies, folder.attempts)
        for path in (*folders, folder.wandb, folder.tensorboard):
            shutil.rmtree(path, ignore_errors=True)
    write_atomically(folder.config, to_toml(config).encode(), mode=0o600 if config.rollout.api_key else 0o644)
    return folder


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        _lock_file(path).touch()
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be written: {error.strerror}",
            expected="a folder this user may write to",
            remedy="set run.folder to another place, or mend its rights",
        ) from None


def _lock_file(path: Path) -> Path:
    """Beside the run folder, so that a copy of the folder carries no lock."""
    return path.with_name(f".{path.name}.lock")


def _hold(path: Path) -> None:
    """Own the folder until this process ends, however it ends: a second process that runs there is refused."""
    if path.resolve() in _held:
        return
    lock = _lock_file(path).open("r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{path} belongs to a run that is still going (process {lock.read().strip() or 'unknown'})",
            expected="one run a folder",
            remedy="choose another run.name, or stop that run first",
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    _held[path.resolve()] = lock


def resume_run(folder: RunFolder, first_update: int) -> None:
    """Forget what was written of `first_update` and later: they will be taken again. Events stay, whole lines."""
    if folder.metrics.exists():
        kept = [line for line, row in json_lines(folder.metrics) if row["update"] < first_update]
        write_atomically(folder.metrics, b"".join(kept))
    for path in folder.trajectories.glob("update_*.jsonl"):
        if int(path.stem.removeprefix("update_")) >= first_update:
            path.unlink()
    for path in folder.attempts.glob("update_*.jsonl"):
        if int(path.stem.removeprefix("update_")) > first_update:
            path.unlink()
    if folder.events.exists():
        os.truncate(folder.events, whole_bytes(folder.events))


def open_folder(path: str | Path) -> RunFolder:
    """The folder of a run that exists; raises UserError when there is none."""
    folder = RunFolder(Path(path))
    if not folder.metrics.is_file() or not folder.metrics.stat().st_size:
        raise UserError(
            f"{folder.path}: {'an empty' if folder.metrics.is_file() else 'no'} metrics.jsonl",
            expected="the folder of a run that has taken an update",
            remedy="name one of runs/*/",
        )
    return folder


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Readers see the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.chmod(mode)
    os.replace(partial, path)
