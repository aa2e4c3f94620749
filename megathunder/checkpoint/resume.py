"""Which checkpoint a start goes on from, and which settings may have changed since.

A run may be resumed with another schedule, layout, batch, learning rate or length: changes are named, a line each, on
the terminal, in `resumptions.jsonl` and in the report. Refused is what would make the saved position meaningless:
another stream of tasks, other trained parameters, or an optimizer whose state has another form. Called by the process
that starts a run, before anything expensive, and by the coordinator.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megathunder.checkpoint.folder import newest
from megathunder.checkpoint.state import RunState, read_state
from megathunder.config import Config
from megathunder.config.model_shape import read_model_shape
from megathunder.config.toml import read_config
from megathunder.errors import ConfigError
from megathunder.tasks import ListedSource, build_source

log = logging.getLogger(__name__)

FIXED = (
    *("tasks.source", "tasks.kinds", "tasks.seed", "tasks.size"),
    *("learner.lora_rank", "learner.lora_targets", "learner.distributed_optimizer"),
)
SILENT = ("run.resume", "run.overwrite", "run.progress", "run.folder", "rollout.port")
SECRET = ("rollout.api_key", "sandbox.api_key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A complete checkpoint and what it says; `changed` are settings that differ: "name: old -> new"."""

    folder: Path
    state: RunState
    changed: tuple[str, ...]


def resume_hint(checkpoints: Path) -> str:
    """Where a run that ended too early can go on from, in words."""
    if found := newest(checkpoints, lambda _: None):
        return f"the last checkpoint is {found}; --run.resume goes on from it"
    return "no checkpoint was saved (run.checkpoint_every); --run.overwrite starts anew"


def nothing_to_resume(run: Path) -> ConfigError:
    """What to say where `run` has no complete checkpoint: which runs beside it have one."""
    runs = sorted(path.name for path in run.parent.glob("*") if newest(path / "checkpoints", lambda _: None))
    there = f"runs with one in {run.parent}: {', '.join(runs)}" if runs else f"no run in {run.parent} has one"
    seen = "has no complete checkpoint" if run.is_dir() else "does not exist"
    return ConfigError(
        f"--run.resume and {run} {seen}",
        expected=f"a run with a complete checkpoint; {there}",
        remedy="name one of these (--run.name), or leave out --run.resume (--run.overwrite if the folder exists)",
    )


def find_resumption(config: Config, checkpoints: Path) -> Resumption | None:
    """The newest complete checkpoint in `checkpoints`, or None; ConfigError if `config` cannot go on from it."""
    folder = newest(checkpoints, log.warning)
    if folder is None:
        return None
    found = list(changes(read_config(folder / "config.toml"), config))
    for name, old, new in found:
        # Beside bfloat16 weights the optimizer keeps a copy of them in float32, which others have not.
        if name in FIXED or name == "learner.dtype" and "bfloat16" in (old, new):
            raise ConfigError(
                f"--run.resume with {name} = {new!r}; {folder} was made with {old!r}",
                expected="the same: the stream of tasks, the trained parameters or the optimizer would be others",
                remedy=f"set {name} = {old!r}, or give the run a new --run.name",
            )
    _refuse_another_shape(folder, found)
    state = read_state(folder)
    if state.source.digest:  # tasks that are read, and not generated
        source = build_source(config.tasks)
        if isinstance(source, ListedSource) and source.differs_from(state.source):
            source.restore(state.source)
    told = tuple(f"{name}: {old!r} -> {new!r}" for name, old, new in found if name not in SILENT + SECRET)
    return Resumption(folder=folder, state=state, changed=told)


def _refuse_another_shape(folder: Path, found: list[tuple[str, object, object]]) -> None:
    """The folder of the model may move, or be that of another run's result; the weights must still fit."""
    for name, old, new in found:
        if name != "learner.model" or not Path(str(old)).is_dir():
            continue
        before, after = (replace(read_model_shape(str(path)), max_positions=0) for path in (old, new))
        if before != after:
            raise ConfigError(
                f"--run.resume with learner.model = {new!r}, a model of another shape than {old!r}, "
                f"with which {folder} was made",
                expected="a model of the same shape: the weights of the checkpoint go on",
                remedy=f"set learner.model = {old!r}, or give the run a new --run.name",
            )


def changes(old: Config, new: Config) -> Iterator[tuple[str, object, object]]:
    """(dotted name, old value, new value) of every setting that differs."""
    before, after = (dict(_flat(dataclasses.asdict(config))) for config in (old, new))
    yield from ((name, before[name], value) for name, value in after.items() if before[name] != value)


def _flat(table: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and not prefix:
            yield from _flat(value, f"{key}.")
        else:
            yield prefix + key, value
