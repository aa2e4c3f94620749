"""The run on disk: saving a checkpoint, going on from one, and the policy for people to use.

    save      new folder -> SaveCheckpoint on every rank -> coordinator.json, config.toml -> commit -> keep the newest n
              in the background: the same, but the ranks answer once they have a copy, and write beside the next update
              -> every rank has written -> FinishCheckpoint, between two pieces of its work -> ...
    resume    LoadCheckpoint on every rank -> task source, update, version -> weights to every server
    export    Hugging Face folder runs/<name>/policy

State is saved between updates only, or while an update's rollouts run (nothing of it is in the weights yet); that
update's prompts are then taken again. An update sampled one ahead (one_step_off) is sampled again after a resume.
Called by the coordinator.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megathunder import tracing
from megathunder.checkpoint.folder import begin, commit, prune
from megathunder.checkpoint.resume import Resumption
from megathunder.checkpoint.state import Control, ControlState, RunState, learner_folder, write_state
from megathunder.config import Config
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.coordinator.supply import Position
from megathunder.errors import InfrastructureFailure, MegathunderError
from megathunder.learner.checkpoint import checkpoint_status
from megathunder.metrics.run_folder import RunFolder
from megathunder.types import ExportPolicy, FinishCheckpoint, LoadCheckpoint, SaveCheckpoint

DISK_S = 1800.0  # limit of one save, load or export
POLL_S = 0.1


@dataclass(slots=True, kw_only=True)
class Persistence:
    """What must be remembered to save a run, and the saving."""

    config: Config
    folder: RunFolder
    learner: LearnerClient
    supply: Position | None = None  # None: nothing is saved, since the run makes no policy
    controls: Sequence[Control] = ()
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    _saved: int = -1
    _writing: asyncio.Task[None] | None = None

    @property
    def off(self) -> bool:
        """Nothing is saved."""
        return self.supply is None

    def due(self, update: int) -> bool:
        """Whether a checkpoint follows update `update`."""
        run = self.config.run
        return bool(run.checkpoint_every and (update + 1) % run.checkpoint_every == 0 or update + 1 == run.updates)

    async def save(self, update: int, version: int, *, elapsed_s: float, background: bool = False) -> Path | None:
        """Save the state in which `update` is the next one to take; None when that has been saved.

        `background`: the learner goes on from the moment it has a copy, where `run.checkpoint_background` lets it; what
        goes wrong then is raised by `check`, `settle` or the next save. At most one is on its way."""
        await self.settle()
        if self.off or update == self._saved:
            return None
        background = background and self.config.run.checkpoint_background
        started_s = time.monotonic()
        state = self._state(update, version, elapsed_s)
        partial = await asyncio.to_thread(begin, self.folder.checkpoints, update)
        files = str(learner_folder(partial))
        await self.learner.everywhere(
            lambda item: SaveCheckpoint(item=item, folder=files, background=background), DISK_S
        )
        if background:
            tracing.record(tracing.RUN_LANE, "save", started_s, time.monotonic(), update=update)
            self._writing = asyncio.create_task(self._complete_later(partial, state))
            return None
        final = await self._complete(partial, state)
        tracing.record(tracing.RUN_LANE, "save", started_s, time.monotonic(), update=update)
        return final

    def check(self) -> None:
        """Raise what went wrong with a save in the background, if that has ended."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    async def settle(self) -> None:
        """Wait for the save in the background; raises what went wrong with it."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def abandon(self) -> None:
        """Leave a save in the background as it is: its folder does not count."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def _state(self, update: int, version: int, elapsed_s: float) -> RunState:
        return RunState(
            run_id=self.run_id,
            update=update,
            policy_version=version,
            source=self.supply.position(update),
            seed=self.config.run.seed,
            elapsed_s=elapsed_s,
            controls=tuple(ControlState(name=control.name, data=control.state()) for control in self.controls),
        )

    async def _complete_later(self, partial: Path, state: RunState) -> None:
        started_s = time.monotonic()
        files = learner_folder(partial)
        while len(told := await asyncio.to_thread(checkpoint_status.read_all, files)) < self.learner.ranks:
            self.learner.check()
            if time.monotonic() - started_s > DISK_S:
                raise InfrastructureFailure(f"{files} was not written within {DISK_S:.0f} s")
            await asyncio.sleep(POLL_S)
        if wrong := {rank: error for rank, error in told.items() if error}:
            rank, error = min(wrong.items())
            raise MegathunderError(f"learner rank {rank} could not write its part of {files}: {error}")
        await self.learner.everywhere(lambda item: FinishCheckpoint(item=item), DISK_S)
        await asyncio.to_thread(checkpoint_status.clear, files)
        await self._complete(partial, state)
        tracing.record(tracing.CHECKPOINT_LANE, "write", started_s, time.monotonic(), update=state.update)

    async def _complete(self, partial: Path, state: RunState) -> Path:
        """Everything is written but the coordinator's part and the marker."""
        write_state(partial, state, self.config)
        final = await asyncio.to_thread(commit, partial)
        await asyncio.to_thread(prune, self.folder.checkpoints, self.config.run.keep_checkpoints)
        self._saved = state.update
        return final

    async def load(self, found: Resumption) -> None:
        """Put learner, task source and controllers where the checkpoint left them."""
        files = str(learner_folder(found.folder))
        await self.learner.everywhere(lambda item: LoadCheckpoint(item=item, folder=files), DISK_S)
        self.supply.restore(found.state.source)
        states = {control.name: control.data for control in found.state.controls}
        for control in self.controls:
            if control.name in states:
                control.restore(states[control.name])
        self.run_id, self._saved = found.state.run_id, found.state.update

    async def export(self, after: int = 0) -> Path | None:
        """Write the policy as a Hugging Face folder, that of `after` updates or the last one; an older one is replaced
        when the new one is whole."""
        if self.off:
            return None
        final = self.folder.policy_after(after) if after else self.folder.policy
        final.parent.mkdir(exist_ok=True)
        partial = final.with_name(f".{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        await self.learner.on_first_cell(lambda item: ExportPolicy(item=item, folder=str(partial)), DISK_S)
        older = final.with_name(f".{final.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        if final.exists():
            final.rename(older)
        partial.rename(final)
        shutil.rmtree(older, ignore_errors=True)
        return final
