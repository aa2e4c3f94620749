"""What the coordinator saves of itself: where the run stands, beside the learner's own files.

    checkpoint/learner/          weights, optimizer, counters, generators (`learner/checkpoint/learner_state.py`)
               coordinator.json  RunState
               config.toml       the settings it was made with

The coordinator draws no random numbers of its own: sampling seeds come from (run seed, update, group, index, turn), the
order of tasks from (task seed, epoch). So `update` and `source` are all it takes to sample the same tokens again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.errors import UserError
from megathunder.tasks.source import SourceState

FORMAT = 1


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one controller (group sizes, draft corpora): bytes that it alone reads."""

    name: str
    data: bytes


class Control(Protocol):
    """A controller that learns while a run goes on. `restore` takes what `state` gave."""

    name: str

    def state(self) -> bytes: ...

    def restore(self, data: bytes) -> None: ...


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Updates 0 .. update - 1 are done; the weights are version `policy_version`; `source` is where batch `update`
    begins."""

    run_id: str
    update: int
    policy_version: int
    source: SourceState
    seed: int
    elapsed_s: float = 0.0  # wall time of the run until then, over all its starts
    controls: tuple[ControlState, ...] = ()
    format: int = FORMAT


def learner_folder(checkpoint: Path) -> Path:
    """Where the learner's ranks write."""
    return checkpoint / "learner"


def write_state(checkpoint: Path, state: RunState, config: Config) -> None:
    """Put the coordinator's part into a checkpoint that is being filled."""
    (checkpoint / "coordinator.json").write_bytes(msgspec.json.encode(state))
    (checkpoint / "config.toml").write_text(to_toml(config))


def read_state(checkpoint: Path) -> RunState:
    """The coordinator's part of a complete checkpoint; UserError for one of another format."""
    path = checkpoint / "coordinator.json"
    try:
        state = msgspec.json.decode(path.read_bytes(), type=RunState)
    except msgspec.DecodeError as error:
        state, seen = None, str(error)
    else:
        seen = f"format {state.format}"
    if state is None or state.format != FORMAT:
        raise UserError(
            f"{path}: {seen}",
            expected=f"a checkpoint of format {FORMAT}",
            remedy="resume it with the version of megathunder that wrote it, or start anew with --run.overwrite",
        )
    return state
