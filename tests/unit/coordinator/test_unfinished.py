"""An update that does not end leaves a line that says how far it was and what ended it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from test_loop import settings

from megathunder.coordinator import process
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.record import UpdateRecord
from megathunder.coordinator.rollouts import Rollouts, Stopped
from megathunder.coordinator.unfinished import UnfinishedUpdate
from megathunder.errors import InfrastructureFailure
from megathunder.metrics.run_folder import RunFolder
from megathunder.tasks import ExactAnswer, Task
from megathunder.types import TrajectoryId, TrajectoryLost
from tests.unit.coordinator.recordings import trajectory_events

TASK = Task(id="t", kind="k", prompt="p", files=(), grading=ExactAnswer(answer=""))


@pytest.mark.parametrize(
    ("ended_by", "reason"),
    [
        (InfrastructureFailure("every rollout server is lost"), "every rollout server is lost"),
        (ExceptionGroup("of a task group", [KeyError("no such tool")]), "KeyError: 'no such tool'"),
        (Stopped(), "the run was asked to end"),
        (asyncio.CancelledError(), "interrupted"),
    ],
)
def test_whatever_ends_an_update_leaves_a_line_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: BaseException, reason: str
) -> None:
    config = settings("thundersync")
    parts = SimpleNamespace(persistence=SimpleNamespace(folder=RunFolder(tmp_path)))
    coordinator = Coordinator(config=config, parts=parts, update=3)  # type: ignore[arg-type]
    rollouts = Rollouts(update=3, batch=3, policy_version=7, groups=[[TASK] * 3])
    coordinator._records[3] = UpdateRecord(
        config,
        rollouts,
        schedule="thundersync",
        shape=None,
        cells=1,
        peak_flops=0.0,  # type: ignore[arg-type]
    )
    for event in trajectory_events(random.Random(0), TrajectoryId(3, 0, 0), reward=0.5):
        rollouts.record(event)
    rollouts.record(TrajectoryLost(id=TrajectoryId(3, 0, 1), reason="the server died", at_s=1.0))

    async def train(_: Coordinator) -> None:
        raise ended_by

    async def begin(_: Coordinator) -> None:
        pass

    async def run(work: Awaitable[None]) -> None:
        await work

    monkeypatch.setattr(process, "train", train)
    monkeypatch.setattr(Coordinator, "begin", begin)
    work = process._until_stopped(coordinator, SimpleNamespace())  # type: ignore[arg-type]
    if isinstance(ended_by, Stopped):
        asyncio.run(run(work))
    else:
        with pytest.raises(type(ended_by)):
            asyncio.run(run(work))
    (line,) = RunFolder(tmp_path).unfinished_updates.read_bytes().splitlines()
    found = msgspec.json.decode(line, type=UnfinishedUpdate)
    assert (found.update, found.policy_version, found.phase, found.reason) == (3, 7, "rollout", reason)
    assert (found.trajectories_expected, found.trajectories_completed, found.trajectories_rewarded) == (3, 1, 1)
    assert (found.trajectories_lost, found.reward_mean) == ({"the server died": 1}, 0.5)
    assert found.sampled_tokens > 0
