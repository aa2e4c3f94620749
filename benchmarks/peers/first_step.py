"""Whether both trainers take one gradient for one batch: TRL's first step, replayed through our scheduler and learner.

    loss         sum(-A log pi) / tokens, of both        (TRL prints -sum(A) / tokens, whose gradient is the same)
    grad_norm    before the clip

Relative differences; of the loss relative to the mean of |A log pi|, since its terms cancel. Called by `trl_grpo.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comparison.alternation import Alternation, Recording
from benchmarks.comparison.job import replay_config, run_job
from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import TrajectoryWriter
from megathunder.types import (
    EndReason,
    Rewarded,
    Role,
    Row,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TurnCompleted,
)

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """Both sides' numbers."""

    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    scale: float
    """Mean of |A log pi| over tokens, with log pi = log V: the size of the terms that cancel in the loss."""

    @property
    def loss_difference(self) -> float:
        return abs(self.loss[0] - self.loss[1]) / self.scale

    @property
    def grad_norm_difference(self) -> float:
        return abs(self.grad_norm[0] / self.grad_norm[1] - 1.0)

    @property
    def agrees(self) -> bool:
        return max(self.loss_difference, self.grad_norm_difference) <= TOLERANCE

    def as_table(self) -> dict[str, object]:
        differences = {"loss": self.loss_difference, "grad_norm": self.grad_norm_difference}
        return dataclasses.asdict(self) | {"relative_difference": differences, "tolerance": TOLERANCE}


def compare_first_step(folder: Path, config: Config, step: dict, vocabulary: int) -> FirstStep:
    """`folder` holds first_step.json, `step` is TRL's line for it; `config` is that of our side."""
    kept = json.loads((folder / "first_step.json").read_text())
    recorded = folder / "recorded"
    write_recording(recorded, config, kept)
    replayed = replay_config(recorded, name="replayed", folder=str(folder), updates=1)
    (row,) = read_rows(
        run_job(replayed, ranks=1, alternation=Alternation(recording=Recording(run=str(recorded)))).metrics
    )
    tokens = sum(len(one["completion"]) for one in kept)
    absolute = sum(abs(one["advantage"]) * len(one["completion"]) for one in kept) / tokens
    return FirstStep(
        loss=(row.loss or 0.0, step["loss"]),
        grad_norm=(row.grad_norm, step["grad_norm"]),
        scale=absolute * math.log(vocabulary),
    )


def write_recording(folder: Path, config: Config, kept: list[dict]) -> None:
    """The completions as a recorded run of one update; groups are neighbours, as TRL lays them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(to_toml(config))
    writer = TrajectoryWriter(RunFolder(folder), lambda ids: "")
    for number, one in enumerate(kept):
        identity = TrajectoryId(0, *divmod(number, config.run.group_size))
        count = len(one["completion"])
        segments = (
            Segment(role=Role.PROMPT, token_ids=tuple(one["prompt"])),
            Segment(
                role=Role.ACTION,
                token_ids=tuple(one["completion"]),
                logprobs=(0.0,) * count,
                policy_versions=(0,) * count,
            ),
        )
        trajectory = Trajectory(
            id=identity,
            task_id=f"prompt-{identity.group}",
            rows=(Row(segments=segments),),
            end_reason=EndReason.ANSWERED,
            started_s=0.0,
            completed_s=0.1,
            turns=1,
        )
        writer.note(TurnCompleted(id=identity, turn=0, row=0, segments=segments, at_s=0.1))
        writer.note(TrajectoryCompleted(trajectory=trajectory, at_s=0.1))
        writer.note(Rewarded(id=identity, reward=one["reward"], verifier_s=0.0, at_s=0.1))
    writer.end_update(0)()
