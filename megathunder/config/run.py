"""One run: how long, where to, and how it is watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import NonNegativeInt, OutputPath, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """[run] name, length, batch and evaluation cadence."""

    name: str = "run"
    """Folder `runs/<name>/` receives everything the run writes."""
    folder: OutputPath = "runs"
    """Parent of run folders."""
    host: str = ""
    """Name or address of rank 0's machine, where the coordinator and the weights' update groups are reached; empty:
    loopback on one machine, the address torchrun's ranks meet at on several."""
    updates: PositiveInt = 40
    """Optimizer steps."""
    groups_per_update: PositiveInt = 8
    """B: prompts of one update."""
    group_size: PositiveInt = 8
    """G: trajectories of one prompt (OPD: attempts)."""
    group_control: Literal["fixed", "sagc"] = "fixed"
    """`fixed`: every group has `group_size` trajectories; `sagc`: the first update's do, later ones follow the
    stragglers ([sagc])."""
    seed: NonNegativeInt = 0
    """Seed of sampling, initialisation and shuffling."""
    evaluate_every: NonNegativeInt = 10
    """Evaluate on held-out tasks every n updates; 0: never."""
    evaluate_attempts: PositiveInt = 1
    """Attempts a held-out task."""
    evaluate_at_start: bool = False
    """Evaluate before the first update too, where evaluate_every is on."""
    export_every: NonNegativeInt = 0
    """Write the policy to `policies/update_<n>/` every n updates, for tools/evaluate.py --runs; 0: only at the end."""
    checkpoint_every: NonNegativeInt = 0
    """Save a checkpoint every n updates; 0: only at the end."""
    checkpoint_background: bool = True
    """Write checkpoints beside the next update, from a copy in host memory; false: before it. The last is waited
    for."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep."""
    share_cores: bool = False
    """Learner ranks on a CPU take the cores that no server and no other rank computes on, as in the tail of an update;
    false: one thread each, as with pinned cores or `learner.accumulator` = `exact`."""
    resume: bool = False
    """Continue from the newest complete checkpoint of `runs/<name>/`."""
    stop_timeout_s: PositiveFloat = 25.0
    """On SIGTERM a checkpoint is saved within this time, or the run ends without. Plain torchrun kills after 30 s, or
    its --shutdown-timeout; tools/torchrun.py leaves the time to this."""
    overwrite: bool = False
    """Start anew in a folder that already holds a run."""
    progress: bool = True
    """Draw the live progress display (a plain line an update otherwise)."""
