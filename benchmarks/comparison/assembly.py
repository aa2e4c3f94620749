"""The parts of a run that a measurement alternates: those of a run, or recorded trajectories and the learner alone.

    sampled     as in a run; a batch is drawn once and taken by every schedule        (servers, sandboxes)
    recorded    `replayed_rollouts.py`                                                (no server, no sandbox, no text)

Nothing is saved: such a run makes no policy. Called by `coordinator_process.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation, Recording
from benchmarks.comparison.repeated_supply import RepeatedSupply
from benchmarks.comparison.replayed_rollouts import NoServers, ReplayedSupply, read_recorded
from megathunder.config import Config
from megathunder.config.model_shape import read_model_shape
from megathunder.coordinator.assembly import LEARNER_START_S, OnRestart, Parts, assemble, peak_flops
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.coordinator.persistence import Persistence
from megathunder.coordinator.process import Assemble
from megathunder.coordinator.sizing import GroupSizes
from megathunder.metrics.monitor import open_monitor
from megathunder.metrics.run_folder import RunFolder


def assembly_of(alternation: Alternation) -> Assemble:
    """How the coordinator of `alternation` gets its parts."""

    @contextlib.asynccontextmanager
    async def assemble_measurement(
        config: Config, learner: LearnerClient, on_restart: OnRestart
    ) -> AsyncIterator[Parts]:
        plan = AlternatingUpdates(config, alternation)
        if alternation.recording:
            async with _assemble_replay(config, learner, plan, alternation.recording) as parts:
                yield parts
            return
        async with assemble(config, learner, on_restart) as parts:
            nothing = Persistence(config=config, folder=parts.persistence.folder, learner=learner)
            supply = RepeatedSupply(parts.supply)
            yield dataclasses.replace(parts, plan=plan, supply=supply, persistence=nothing)

    return assemble_measurement


@contextlib.asynccontextmanager
async def _assemble_replay(
    config: Config, learner: LearnerClient, plan: AlternatingUpdates, recording: Recording
) -> AsyncIterator[Parts]:
    folder = RunFolder(Path(config.run.folder) / config.run.name)
    recorded = read_recorded(Path(recording.run), recording.updates)
    monitor = open_monitor(config, folder, lambda token_ids: "")
    with contextlib.closing(monitor):
        await learner.connect(LEARNER_START_S)
        yield Parts(
            config=config,
            plan=plan,
            monitor=monitor,
            supply=ReplayedSupply(config, plan, recording, recorded),
            sizes=GroupSizes(config, chooses=False),
            persistence=Persistence(config=config, folder=folder, learner=learner),
            servers=NoServers(),
            learner=learner,
            shape=read_model_shape(config.learner.model),
            peak_flops=peak_flops(config, learner),
            publishes=False,
        )
