"""Batches that several schedules take: drawn for the first, the same again for the others.

Called by `assembly.py`. Trajectories are sampled anew for each schedule, with the seeds of the batch.
"""

from __future__ import annotations

from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.supply import Groups, Supply
from megathunder.tasks import Task


class RepeatedSupply:
    """The `Supply` of a comparison, around that of a run."""

    def __init__(self, supply: Supply) -> None:
        self._supply = supply
        self._batches: dict[int, Groups] = {}
        self._replacements: dict[tuple[int, int], list[Task] | None] = {}

    def groups(self, batch: int) -> Groups:
        if batch not in self._batches:
            self._batches[batch] = self._supply.groups(batch)
        return self._batches[batch]

    def replacement_group(self, batch: int, index: int) -> list[Task] | None:
        if (batch, index) not in self._replacements:
            self._replacements[batch, index] = self._supply.replacement_group(batch, index)
        return self._replacements[batch, index]

    async def collect(self, rollouts: Rollouts, first_group: int) -> None:
        await self._supply.collect(rollouts, first_group)

    def heldout(self) -> Groups:
        return self._supply.heldout()

    async def collect_rewards(self, rollouts: Rollouts, first_group: int) -> None:
        await self._supply.collect_rewards(rollouts, first_group)
