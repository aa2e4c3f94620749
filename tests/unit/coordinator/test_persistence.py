"""Saving: in what order, at most one in the background, and an error that surfaces by the next save."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from megathunder.checkpoint.folder import newest
from megathunder.checkpoint.state import read_state
from megathunder.config import Config
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.persistence import Persistence
from megathunder.errors import MegathunderError
from megathunder.learner.checkpoint import checkpoint_status
from megathunder.metrics.run_folder import RunFolder
from megathunder.tasks import SourceState
from megathunder.types import ExportPolicy, FinishCheckpoint, SaveCheckpoint


class WritingLearner:
    """Two ranks that write when the test says so."""

    ranks = 2

    def __init__(self) -> None:
        self.commands: list[object] = []
        self.files = Path()

    async def everywhere(self, make: Callable[[int], object], timeout_s: float) -> None:
        command = make(len(self.commands))
        self.commands.append(command)
        if isinstance(command, SaveCheckpoint):
            self.files = Path(command.folder)
            self.files.mkdir(parents=True)
            if not command.background:
                (self.files / "learner.json").write_text("{}")
        if isinstance(command, FinishCheckpoint):
            assert len(checkpoint_status.read_all(self.files)) == self.ranks
            (self.files / "learner.json").write_text("{}")

    def check(self) -> None:
        pass


def run(
    folder: Path, work: Callable[[Persistence, WritingLearner], Awaitable[None]], *, background: bool = True
) -> None:
    base = Config()
    config = dataclasses.replace(base, run=dataclasses.replace(base.run, checkpoint_background=background))
    learner = WritingLearner()
    supply = SimpleNamespace(position=lambda update: SourceState(epoch=0, cursor=update))
    persistence = Persistence(config=config, folder=RunFolder(folder), learner=learner, supply=supply)  # type: ignore
    asyncio.run(work(persistence, learner))


def test_a_background_save_is_marked_once_every_rank_has_written(tmp_path: Path) -> None:
    checkpoints = RunFolder(tmp_path).checkpoints

    async def work(persistence: Persistence, learner: WritingLearner) -> None:
        assert await persistence.save(3, 3, elapsed_s=1.0, background=True) is None
        checkpoint_status.write(learner.files, 1)
        await asyncio.sleep(0.3)
        persistence.check()
        assert newest(checkpoints, pytest.fail) is None and len(learner.commands) == 1
        checkpoint_status.write(learner.files, 0)
        await persistence.settle()
        assert isinstance(learner.commands[-1], FinishCheckpoint)

    run(tmp_path, work)
    saved = newest(checkpoints, pytest.fail)
    assert read_state(saved).update == 3
    assert [path.name for path in (saved / "learner").iterdir()] == ["learner.json"]


def test_the_next_save_waits_for_the_one_in_the_background(tmp_path: Path) -> None:
    async def work(persistence: Persistence, learner: WritingLearner) -> None:
        await persistence.save(1, 1, elapsed_s=1.0, background=True)
        final = asyncio.create_task(persistence.save(2, 2, elapsed_s=2.0))
        await asyncio.sleep(0.3)
        assert len(learner.commands) == 1 and not final.done()
        for rank in range(2):
            checkpoint_status.write(learner.files, rank)
        assert (await final).name == "update_00002"

    run(tmp_path, work)
    names = sorted(path.name for path in RunFolder(tmp_path).checkpoints.iterdir())
    assert names == ["update_00001", "update_00002"]


def test_a_background_save_that_failed_is_told_by_the_next_update_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    async def work(persistence: Persistence, learner: WritingLearner) -> None:
        await persistence.save(1, 1, elapsed_s=1.0, background=True)
        checkpoint_status.write(learner.files, 0)
        checkpoint_status.write(learner.files, 1, "OSError: No space left on device")
        await asyncio.sleep(0.3)
        with pytest.raises(MegathunderError, match="rank 1 could not write .* No space"):
            persistence.check()
        with pytest.raises(MegathunderError, match="No space"):
            await persistence.save(2, 2, elapsed_s=2.0)
        await persistence.abandon()

    run(tmp_path, work)
    assert newest(RunFolder(tmp_path).checkpoints, pytest.fail) is None


def test_without_the_setting_a_save_is_complete_before_the_run_goes_on(tmp_path: Path) -> None:
    async def work(persistence: Persistence, learner: WritingLearner) -> None:
        assert (await persistence.save(1, 1, elapsed_s=1.0, background=True)).name == "update_00001"
        assert [command.background for command in learner.commands] == [False]

    run(tmp_path, work, background=False)


def test_an_exported_policy_replaces_the_older_one_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.policy.mkdir()
    (folder.policy / "model").write_text("older")
    there: list[str] = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        there.extend(file.read_text() for file in tmp_path.rglob("model"))
        return rename(path, target)

    async def work(persistence: Persistence, learner: WritingLearner) -> None:
        async def on_first_cell(make: Callable[[int], ExportPolicy], timeout_s: float) -> None:
            whole = Path(make(0).folder)
            whole.mkdir()
            (whole / "model").write_text("newer")

        learner.on_first_cell = on_first_cell  # type: ignore[attr-defined]
        monkeypatch.setattr(Path, "rename", watched)
        assert await persistence.export() == folder.policy

    run(tmp_path, work)
    assert there.count("older") == 2, "it stands until the newer one has its name"
    assert [file.read_text() for file in tmp_path.rglob("model")] == ["newer"]


def test_only_a_run_that_keeps_checkpoints_is_said_to_go_on(tmp_path: Path) -> None:
    def said(*, keeps: bool) -> str:
        config = Config()
        lines: list[str] = []
        supply = SimpleNamespace(position=lambda update: SourceState(epoch=0, cursor=update)) if keeps else None
        folder, learner = RunFolder(tmp_path), WritingLearner()
        persistence = Persistence(config=config, folder=folder, learner=learner, supply=supply)  # type: ignore
        parts = SimpleNamespace(persistence=persistence, monitor=SimpleNamespace(print=lines.append))
        asyncio.run(Coordinator(config=config, parts=parts, update=3).finish())  # type: ignore[arg-type]
        return lines[0]

    assert (
        said(keeps=True) == f"stopped after 3 updates; saved {tmp_path}/checkpoints/update_00003; --run.resume goes on"
    )
    assert said(keeps=False) == "stopped after 3 updates", "a measurement cannot be resumed"
