"""Where tasks come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import InputPath, NonNegativeFloat, NonNegativeInt, PositiveInt
from megathunder.errors import ConfigError

KINDS = {
    "shell": ("read", "count", "sum", "chase", "find", "job", "fix"),
    "math": tuple(f"{sign}{size}" for sign in ("plus", "minus", "times") for size in ("", "_30", "_99")),
}
"""Kinds of the task families that are generated; tasks that are read from files have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksConfig:
    """[tasks] which tasks a run trains on, in what order, and which it keeps for evaluation."""

    source: Literal["shell", "math", "swe", "terminal"] = "shell"
    """Task family: `shell` and `math` are generated from the seed; `swe` (SWE-smith, SWE-bench) and `terminal` (Harbor,
    Terminal-Bench 1, SETA) are read from `path`."""
    path: InputPath = ""
    """File or folder that a `swe` or `terminal` source reads; for `math` a file of problems with answers, instead of
    generated ones."""
    kinds: tuple[str, ...] = ()
    """Kinds of the family to draw from; empty means all."""
    seed: NonNegativeInt = 0
    """Seed of the task stream (content and order)."""
    # made when the run starts, a tenth of a millisecond each
    size: Annotated[int, Meta(gt=0, le=1048576)] = 4096
    """Distinct training tasks; the stream wraps after them, reshuffled from the seed."""
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
