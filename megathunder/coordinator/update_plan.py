"""What each update of a run is: its settings and the batch of prompts it takes.

    update u    the run's configuration, batch u

A measurement that runs several schedules on the same batches passes a plan of its own. Called by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megathunder.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """Update `update` under `config`, which the metrics call `name`. `first`: nothing that was sampled before belongs
    to it. `last`: nothing is sampled ahead of its end."""

    update: int
    config: Config
    name: str
    batch: int
    first: bool
    last: bool


class UpdatePlan(Protocol):
    """The updates of a run, by number from 0."""

    def spec(self, update: int) -> UpdateSpec: ...


@dataclass(frozen=True, slots=True)
class ConfiguredUpdates:
    """Every update as the configuration says."""

    config: Config

    def spec(self, update: int) -> UpdateSpec:
        """Update `update`, 0-based."""
        return UpdateSpec(
            update=update,
            config=self.config,
            name=self.config.schedule,
            batch=update,
            first=update == 0,
            last=update + 1 >= self.config.run.updates,
        )
