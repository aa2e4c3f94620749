"""Where tasks come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import (
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Reference,
)
from megathunder.errors import ConfigError

KINDS = {
    "shell": ("read", "count", "sum", "chase", "find", "job", "fix"),
    "math": tuple(f"{sign}{size}" for sign in ("plus", "minus", "times") for size in ("", "_30", "_99")),
}
"""Kinds of the task families that are generated; tasks that are read from files have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """[tasks] which tasks a run trains on, in what order, and which it keeps for evaluation."""

    source: Reference = "shell"
    """Where tasks come from: `table` (rows of prompts at `path`), `seeds` (a number per task, for an
    environment), `reasoning_gym`, `shell` and `math` (generated from the seed), `swe` (SWE-smith, SWE-bench),
    `terminal` (Harbor, Terminal-Bench 1, SETA), or your own "file.py:load"."""
    path: InputPath = ""
    """What the source reads. `table`: a JSON, JSONL or Parquet file, a folder saved by `datasets`, or a Hub id. `swe`,
    `terminal`: a file or folder; `math`: a file of problems with answers, instead of generated ones."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of a table's columns where they differ from ours: [tasks.columns] prompt = "question", label = "answer",
    system, kind, id, split likewise."""
    system: str = ""
    """System message of every row of a table that has none of its own."""
    split: str = "train"
    """Split of a saved dataset or a Hub id to train on."""
    heldout_split: str = ""
    """Split of a saved dataset or a Hub id to hold out."""
    heldout_path: InputPath = ""
    """Table of held-out rows. Without one, a column `split` decides (all but "train" are held out), or else a digest of
    the prompt: one row in eight."""
    overlong_prompts: Literal["leave_out", "refuse"] = "leave_out"
    """Prompts that leave no room for an answer within `rollout.max_tokens`: `leave_out` (counted and named), or
    `refuse` the run."""
    on_change: Literal["refuse", "next_epoch"] = "refuse"
    """A resumed run whose tasks are not those of its checkpoint: `refuse`, or go on with the `next_epoch` of the new
    ones."""
    environment: Reference = ""
    """Class that answers the policy turn by turn: "file.py:Class", `gymnasium`, `textarena` or `openenv`."""
    environment_timeout_s: PositiveFloat = 60.0
    """Limit of one call of the environment; one that takes longer is a fault."""
    options: dict[str, str] = field(default_factory=dict)
    """Keyword arguments of the source or environment, as strings."""
    kinds: tuple[str, ...] = ()
    """Kinds of the family to draw from; empty means all."""
    seed: NonNegativeInt = 0
    """Seed of the task stream (content and order)."""
    # made when the run starts, a tenth of a millisecond each
    size: Annotated[int, Meta(gt=0, le=1048576)] = 4096
    """Distinct training tasks that are generated; the stream wraps after them, reshuffled from the seed."""
    wrap: bool = True
    """Start again when the tasks are used up; off: a batch larger than what is left is an error."""
    # made and sampled at every evaluation; making takes a millisecond each
    heldout: Annotated[int, Meta(ge=0, le=8192)] = 64
    """Held-out tasks for evaluation, disjoint in content from training."""
    latency_scale: NonNegativeFloat = 1.0
    """Factor on the long-tailed time that slow tools take (0 turns waiting off)."""
    max_turns: PositiveInt = 6
    """Turns an episode may take."""


def check_kinds(tasks: TasksConfig) -> None:
    """Raise ConfigError for kinds that the source does not have."""
    known = KINDS.get(tasks.source, ())
    if unknown := [kind for kind in tasks.kinds if kind not in known]:
        raise ConfigError(
            f"tasks.kinds names {', '.join(unknown)} with tasks.source = {tasks.source!r}",
            expected=f"some of {', '.join(known)}" if known else "no kinds: its tasks are what tasks.path holds",
            remedy="correct the names, or set tasks.kinds = [] for all",
        )
