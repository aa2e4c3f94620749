"""Whole runs whose group sizes follow the stragglers: every schedule, and a run that is stopped and resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_loop import AnsweringLearner, settings

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation
from benchmarks.comparison.repeated_supply import RepeatedSupply
from benchmarks.comparison.replayed_rollouts import NoServers
from megathunder.config import Config
from megathunder.coordinator.assembly import Parts
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.persistence import Persistence
from megathunder.coordinator.sizing import GroupSizes
from megathunder.coordinator.supply import SampledSupply
from megathunder.loop import train
from megathunder.metrics.resumptions import read_resumptions
from megathunder.metrics.row import MetricsRow
from megathunder.metrics.run_folder import RunFolder
from megathunder.tasks import build_source
from megathunder.types import Done, TrajectoryId, WorkStats
from tests.unit.coordinator.recordings import trajectory_events


class Sampling:
    """A collector whose trajectories are functions of (batch, group, index): two runs of one batch sample alike."""

    async def collect(self, update, version, groups, emit, *, batch, first_group, first_lane, score) -> None:
        for b, group in enumerate(groups, first_group):
            for i in range(len(group)):
                rng = random.Random(f"{batch}/{b}/{i}")
                for event in trajectory_events(rng, TrajectoryId(update, b, i), reward=float((b + i) % 2)):
                    emit(event)


class SavingLearner(AnsweringLearner):
    """Answers to the commands of a checkpoint, too."""

    async def everywhere(self, make, timeout_s):
        command = make(1 << 40)
        stats = WorkStats(stepped=not getattr(command, "skip", True))
        return command, [Done(item=command.item, cell=c, started_s=0, ended_s=0, stats=stats) for c in range(2)]


def configured(folder: Path, schedule: str, updates: int, **sagc: object) -> Config:
    run = {"group_control": "sagc", "group_size": 8, "updates": updates, "folder": str(folder)}
    return settings(schedule, run=run, sagc={"trajectories_per_update": 24, **sagc})


def trained(
    config: Config, *, resume: bool = False, say=lambda text: None, alternation: Alternation = Alternation()
) -> tuple[list[MetricsRow], GroupSizes]:
    rows: list[MetricsRow] = []
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=resume))
    sizes, learner, folder = GroupSizes(config), SavingLearner(), RunFolder(Path(config.run.folder))
    supply = SampledSupply(config, build_source(config.tasks), Sampling(), sizes)  # type: ignore[arg-type]
    saved = {"learner": learner, "supply": None if alternation.schedules else supply, "controls": (sizes,)}
    quiet = SimpleNamespace(record=lambda e: None, refresh=lambda p: None, print=say, row=rows.append)
    parts = Parts(
        config=config,
        plan=AlternatingUpdates(config, alternation),
        monitor=quiet,  # type: ignore[arg-type]
        supply=RepeatedSupply(supply) if alternation.schedules else supply,
        sizes=sizes,
        persistence=Persistence(config=config, folder=folder, **saved),  # type: ignore[arg-type]
        servers=NoServers(),
        learner=learner,  # type: ignore[arg-type]
        shape=None,  # type: ignore[arg-type]
        peak_flops=0.0,
        publishes=False,
    )

    async def body() -> None:
        coordinator = Coordinator(config=config, parts=parts)
        await coordinator.begin()
        await train(coordinator)

    asyncio.run(body())
    return rows, sizes


def sizings(rows: list[MetricsRow]) -> list[object]:
    return [row.sizing for row in rows]


@pytest.mark.parametrize("schedule", ["sync", "periodic_async", "thundersync", "one_step_off"])
def test_the_update_follows_its_sizes_under_every_schedule(tmp_path: Path, schedule: str) -> None:
    rows, _ = trained(configured(tmp_path, schedule, 8, threshold=1.2))
    assert all(row.contributions_applied == row.trajectories for row in rows)
    sizes = [row.sizing.chosen for row in rows]
    assert sizes[0] == 8 and len(set(sizes)) > 1
    for row, size in zip(rows, sizes, strict=True):
        assert row.sizing.groups_by_size == {size: row.trajectories // size} and abs(row.trajectories - 24) <= size / 2
    assert rows[-1].sizing.multiplier > 0 and set(rows[-1].sizing.posterior) == {4, 8, 16}


@pytest.mark.parametrize("prompt_prior", ["off", "kind"])
def test_ten_updates_are_five_and_a_resume_and_five_bit_for_bit(tmp_path: Path, prompt_prior: str) -> None:
    more = {"threshold": 1.2, "prompt_prior": prompt_prior}
    straight, whole = trained(configured(tmp_path / "a", "thundersync", 10, **more))
    first, _ = trained(configured(tmp_path / "b", "thundersync", 5, **more))
    second, halves = trained(configured(tmp_path / "b", "thundersync", 10, **more), resume=True)
    assert sizings(first) + sizings(second) == sizings(straight) and len(second) == 5
    assert halves.state() == whole.state()


def test_a_run_resumed_on_another_ladder_goes_on_and_names_the_change(tmp_path: Path) -> None:
    trained(configured(tmp_path, "thundersync", 3))
    said: list[object] = []
    rows, _ = trained(configured(tmp_path, "thundersync", 6, sizes=(8, 32)), resume=True, say=said.append)
    assert [row.update for row in rows] == [3, 4, 5] and {row.sizing.chosen for row in rows} <= {8, 32}
    assert "\n  from update 3 on: sagc.sizes: (4, 8, 16) -> (8, 32)" in said[0]
    (resumed,) = read_resumptions(RunFolder(tmp_path).resumptions)
    assert resumed.update == 3
    assert set(resumed.changed) == {"run.updates: 3 -> 6", "sagc.sizes: (4, 8, 16) -> (8, 32)"}


def test_a_comparison_gives_every_schedule_the_same_sizes_and_learns_from_a_batch_once(tmp_path: Path) -> None:
    names = ("sync", "thundersync")
    config = configured(tmp_path, "sync", 12, threshold=1.2)
    rows, _ = trained(config, alternation=Alternation(schedules=names, block=3))
    sizes = {name: [row.sizing.chosen for row in rows if row.schedule == name] for name in names}
    assert sizes["sync"] == sizes["thundersync"] and len(set(sizes["sync"])) > 1
    again = [row.sizing for row in rows if row.schedule == "thundersync"][:3]
    assert len({s.multiplier for s in again}) == 1, "its first block repeats the batches of the block before"
