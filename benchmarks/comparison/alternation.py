"""What a measurement runs in one job: schedules in blocks, on sampled or recorded trajectories.

    schedules A, B; blocks of n     A A B B | B B A A | ...     each round on the same n batches
    no schedule                     update u: the configured schedule, batch u

Rounds alternate their order, so that a drift of the machine falls on all schedules alike. A schedule that samples ahead
does so to the end of its block, as it would for ever; what was sampled for a block of another schedule is thrown away.
Kept as `alternation.json` in the run folder. Called by `benchmarks/alternating.py` and by what reads its runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megathunder.config import Config
from megathunder.coordinator.update_plan import UpdateSpec
from megathunder.errors import UserError
from megathunder.simulator.variant import Variant

FILE = "alternation.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded run as the source of trajectories."""

    run: str
    """Folder of the recorded run."""
    updates: tuple[int, ...] = ()
    """Recorded updates to take, in this order and from the start again when they are used up; empty: all."""
    speed: float = 1.0
    """Recorded release times are divided by this."""
    shuffle_seed: int = 0
    """Exchange the release times of an update's trajectories at random with this seed; 0: as recorded."""
    verifier_s: float = 0.0
    """Added to the time each reward takes after its trajectory is complete."""

    def __post_init__(self) -> None:
        if self.speed <= 0 or self.verifier_s < 0:
            raise UserError(
                f"--speed {self.speed:g} --verifier-s {self.verifier_s:g}",
                expected="a speed above 0, and no negative delay",
                remedy="give --speed 1.0 for recorded times, --verifier-s 0 for recorded rewards",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternation:
    """`learn`: take real steps; otherwise the learning rate is 0 and every update starts from the first policy."""

    schedules: tuple[str, ...] = ()
    block: int = 1
    recording: Recording | None = None
    learn: bool = False
    keep: tuple[str, ...] = field(default=())
    """`gradients` (reduced and normalised, before the clip) and `weights` (after the step) to keep of each update."""

    def write(self, file: Path) -> None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    def applied(self, config: Config) -> Config:
        """`config` as the learner gets it."""
        if self.learn:
            return config
        still = dataclasses.replace(config.learner, learning_rate=0.0, min_learning_rate=0.0, weight_decay=0.0)
        return dataclasses.replace(config, learner=still)


def read_alternation(file: Path) -> Alternation:
    """What `write` wrote."""
    return msgspec.json.decode(file.read_bytes(), type=Alternation)


def alternation_of(run: Path) -> Alternation:
    """That of a finished or stopped run; UserError where the run is none that a measurement started."""
    file = run / FILE
    if not file.is_file():
        raise UserError(
            f"{run} has no {FILE}",
            expected="the folder of a run that tools/compare.py or tools/replay.py has started",
            remedy="name such a folder, or run the comparison again",
        )
    return read_alternation(file)


def tensor_file(run: Path, kind: str, update: int) -> Path:
    """Where `gradients` or `weights` of an update lie, if they were kept."""
    return run / kind / f"update_{update:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class AlternatingUpdates:
    """The `UpdatePlan` of an alternation."""

    config: Config
    alternation: Alternation

    def variant(self, update: int) -> Variant:
        """What update `update` runs under."""
        names = self.alternation.schedules
        if not names:
            return Variant(name=self.config.schedule, schedule=self.config.schedule)
        round_, turn = divmod(update // self.alternation.block, len(names))
        return Variant.parse((names if round_ % 2 == 0 else names[::-1])[turn])

    def spec(self, update: int) -> UpdateSpec:
        """Update `update`, 0-based."""
        names, block, variant = self.alternation.schedules, self.alternation.block, self.variant(update)
        number, within = divmod(update, block)
        return UpdateSpec(
            update=update,
            config=variant.apply(self.config),
            name=variant.name,
            batch=number // len(names) * block + within if names else update,
            first=within == 0 if names else update == 0,
            last=not names and update + 1 >= self.config.run.updates,
        )
