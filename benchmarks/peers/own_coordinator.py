"""The coordinator of our side: that of a measurement, with rollouts that wait for the gate in the run folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.comparison.alternation import alternation_of
from benchmarks.comparison.assembly import assembly_of
from benchmarks.peers.gate import POLL_S, is_open
from megathunder.config import Config
from megathunder.coordinator.assembly import OnRestart, Parts
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.coordinator.process import Assemble, main
from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.supply import Groups, Supply
from megathunder.tasks import Task


class GatedSupply:
    """The `Supply` of a run, whose updates begin in turn with those of another trainer."""

    def __init__(self, supply: Supply, gate: Path) -> None:
        self._supply, self._gate = supply, gate

    def groups(self, batch: int) -> Groups:
        return self._supply.groups(batch)

    def another(self, batch: int, index: int) -> list[Task] | None:
        return self._supply.another(batch, index)

    async def collect(self, rollouts: Rollouts, first_group: int) -> None:
        while not is_open(self._gate, rollouts.update):
            await asyncio.sleep(POLL_S)
        await self._supply.collect(rollouts, first_group)

    def heldout(self) -> Groups:
        return self._supply.heldout()

    async def collect_rewards(self, rollouts: Rollouts, first_group: int) -> None:
        await self._supply.collect_rewards(rollouts, first_group)


def gated(assemble: Assemble, gate: Path) -> Assemble:
    """`assemble` with a supply that waits for `gate`."""

    @contextlib.asynccontextmanager
    async def assemble_gated(config: Config, learner: LearnerClient, on_restart: OnRestart) -> AsyncIterator[Parts]:
        async with assemble(config, learner, on_restart) as parts:
            yield dataclasses.replace(parts, supply=GatedSupply(parts.supply, gate))

    return assemble_gated


if __name__ == "__main__":
    file, cells, host, descriptor = sys.argv[1:]
    folder = Path(file).parent
    sys.exit(main(file, cells, host, descriptor, assemble=gated(assembly_of(alternation_of(folder)), folder / "gate")))
