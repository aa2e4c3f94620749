"""The loop on recorded trajectories and a learner that only answers: what is drawn, sampled ahead and thrown away."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation, Recording
from benchmarks.comparison.replayed_rollouts import NoServers, ReplayedSupply, read_recorded
from megathunder.config import Config
from megathunder.coordinator.assembly import Parts
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.persistence import Persistence
from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.sizing import GroupSizes
from megathunder.loop import train
from megathunder.metrics.row import MetricsRow
from megathunder.metrics.run_folder import RunFolder
from megathunder.types import Differentiate, Done, TakeStep, WorkStats
from tests.unit.coordinator.recordings import write_update


class AnsweringLearner:
    """Two cells that are done at once with whatever they are given."""

    cells = ranks = 2
    free_cells, cells_with_room = (0, 1), ()

    def __init__(self) -> None:
        self.commands: list[object] = []

    def direct_to(self, inbox: asyncio.Queue) -> None:
        self.inbox = inbox

    def _done(self, command: object, cell: int, stats: WorkStats) -> Done:
        self.commands.append(command)
        now = time.monotonic()
        return Done(item=command.item, cell=cell, started_s=now, ended_s=now, stats=stats)  # type: ignore[attr-defined]

    async def submit(self, cell: int, command: object) -> None:
        tokens = sum(len(r.token_ids) for r in command.rows) if isinstance(command, Differentiate) else 0
        stats = WorkStats(tokens=tokens, trained_tokens=tokens, loss_sum=1.0)
        self.inbox.put_nowait(self._done(command, cell, stats))

    async def everywhere(self, make: object, timeout_s: float) -> tuple[object, list[Done]]:
        command = make(1 << 40)  # type: ignore[operator]
        stats = WorkStats(stepped=not command.skip)
        return command, [self._done(command, cell, stats) for cell in range(self.cells)]


def run(
    recording: Path, config: Config, schedules: tuple[str, ...] = (), *, verifier_s: float = 0.0
) -> tuple[list[MetricsRow], AnsweringLearner]:
    """The rows of a replay of `recording`, and what the learner was told."""
    rows: list[MetricsRow] = []
    learner = AnsweringLearner()
    fast = Recording(run=str(recording), speed=50.0, verifier_s=verifier_s)
    plan = AlternatingUpdates(config, Alternation(schedules=schedules, block=2, recording=fast))
    monitor = SimpleNamespace(record=lambda event: None, refresh=lambda progress: None, row=rows.append)
    parts = Parts(
        config=config,
        plan=plan,
        monitor=monitor,  # type: ignore[arg-type]
        supply=ReplayedSupply(config, plan, fast, read_recorded(recording)),
        sizes=GroupSizes(config, chooses=False),
        persistence=Persistence(config=config, folder=RunFolder(recording), learner=learner),  # type: ignore
        servers=NoServers(),
        learner=learner,  # type: ignore[arg-type]
        shape=None,  # type: ignore[arg-type]
        peak_flops=0.0,
        publishes=False,
    )
    asyncio.run(train(Coordinator(config=config, parts=parts)))
    return rows, learner


def settings(schedule: str = "thundersync", **sections: dict[str, object]) -> Config:
    base = {"run": {"groups_per_update": 3, "group_size": 4, "updates": 1, "evaluate_every": 0}}
    config = dataclasses.replace(Config(), schedule=schedule)
    for name in {**base, **sections}:
        values = {**base.get(name, {}), **sections.get(name, {})}
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values)})
    return config


def recorded(path: Path, groups: int, equal: tuple[int, ...] = ()) -> Path:
    write_update(RunFolder(path), 0, groups=groups, size=4, equal=equal)
    return path


def test_a_group_of_equal_rewards_is_replaced_as_often_as_the_limit_lets(tmp_path: Path) -> None:
    recording = recorded(tmp_path, groups=6, equal=(1, 3))
    for limit, applied, replaced in ((0, 8, 4), (1, 8, 8), (2, 12, 8), (9, 12, 8)):
        grpo = {"dynamic_sampling": limit > 0, "max_replacements": limit}
        (row,), _ = run(recording, settings(grpo=grpo))
        assert row.contributions_applied == applied, limit
        assert row.contributions_dropped == replaced, "group 1, then its replacement 3, are dropped"
        assert row.trajectories == applied + replaced


def test_the_row_of_an_update_of_equal_rewards_says_that_nothing_was_trained(tmp_path: Path) -> None:
    write_update(RunFolder(tmp_path), 0, groups=2, size=4, equal=(0, 1))
    write_update(RunFolder(tmp_path), 1, groups=2, size=4, equal=(1,))
    none, some = run(tmp_path, settings(run={"groups_per_update": 2, "updates": 2}))[0]
    assert (none.stepped, none.trained_tokens, none.loss, none.contributions_applied) == (False, 0, None, 0)
    assert (some.stepped, some.contributions_applied) == (True, 4) and some.loss is not None
    assert 0 < some.trained_tokens < sum(some.tokens_by_lag.values()) == some.trajectories * some.response_tokens_mean


def test_rewards_of_replaced_groups_are_no_part_of_the_batch_and_equal_ones_are_counted_beside_a_kl_term(
    tmp_path: Path,
) -> None:
    recording = recorded(tmp_path, groups=5, equal=(1,))
    (plain,), _ = run(recording, settings())
    (sampling,), _ = run(recording, settings(grpo={"dynamic_sampling": True, "max_replacements": 2}))
    assert plain.reward_mean != 0.5 and sampling.reward_mean == 0.5 and sampling.trajectories == 16
    assert sampling.prompt_reward_max == 0.5, "no group of equal rewards is in the batch"
    (diverging,), _ = run(recording, settings(grpo={"kl_coefficient": 0.1}))
    assert (plain.groups_degenerate, diverging.groups_degenerate) == (1, 1)
    assert diverging.contributions_applied == 12, "every trajectory has a divergence"


def test_graders_slower_than_the_learner_are_waited_for_where_nothing_depends_on_them(tmp_path: Path) -> None:
    """Distillation: no weight needs the reward, the row does. The wait is rollout time, not part of the suffix."""
    write_update(RunFolder(tmp_path), 0, groups=3, size=4, scored=True)
    config = dataclasses.replace(settings(), objective="opd")
    (row,), _ = run(tmp_path, config, verifier_s=0.5)
    assert row.reward_mean == 0.5 and row.contributions_applied > 0
    assert row.rollout_s > 0.5 and row.suffix_s < 0.4


def test_two_groups_that_are_replaced_at_once_are_sampled_once_each() -> None:
    async def sampled() -> list[range]:
        found: list[range] = []

        async def collect(rollouts: Rollouts, groups: range) -> None:
            found.append(groups)

        rollouts = Rollouts(update=0, batch=0, policy_version=0, groups=[[], []]).start(collect)
        rollouts.add_group([], collect)
        rollouts.add_group([], collect)
        await rollouts.ended()
        return found

    assert asyncio.run(sampled()) == [range(2), range(2, 3), range(3, 4)]


def test_an_update_goes_on_when_no_task_is_left_to_draw(tmp_path: Path) -> None:
    recording = recorded(tmp_path, groups=3, equal=(0,))
    (row,), _ = run(recording, settings(grpo={"dynamic_sampling": True, "max_replacements": 5}))
    assert (row.contributions_applied, row.contributions_dropped) == (8, 4)


def test_every_schedule_takes_every_update_of_a_replay(tmp_path: Path) -> None:
    recording = recorded(tmp_path, groups=3)
    for schedule in ("sync", "periodic_async", "thundersync", "one_step_off"):
        rows, _ = run(recording, settings(schedule, run={"updates": 3}))
        assert [row.contributions_applied for row in rows] == [12, 12, 12]
        assert [row.policy_lag_max for row in rows] == ([0, 1, 1] if schedule == "one_step_off" else [0, 0, 0])
        assert all(row.learner_idle_s is not None and row.open_groups_peak is not None for row in rows)


def test_what_was_sampled_ahead_for_another_schedule_is_thrown_away(tmp_path: Path) -> None:
    recording = recorded(tmp_path, groups=3)
    names = ("one_step_off", "thundersync/turn_forward", "thundersync")
    rows, learner = run(recording, settings(run={"updates": 6}), names)
    assert [(row.schedule, row.policy_lag_max) for row in rows] == [
        ("one_step_off", 0),
        ("one_step_off", 1),
        ("thundersync/turn_forward", 0),
        ("thundersync/turn_forward", 0),
        ("thundersync", 0),
        ("thundersync", 0),
    ]
    assert all(row.contributions_applied == 12 for row in rows)
    work = [c for c in learner.commands if isinstance(c, Differentiate)]
    assert {(c.update, c.release) for c in work} == {
        (u, "turn_forward" if u in (2, 3) else "trajectory") for u in range(6)
    }
    assert sum(isinstance(c, TakeStep) for c in learner.commands) == 6 * learner.cells


def test_a_replay_counts_the_stragglers_of_recorded_groups_and_chooses_no_sizes(tmp_path: Path) -> None:
    sagc = {"group_control": "sagc"}
    (row,), _ = run(recorded(tmp_path, groups=3), settings(run=sagc))
    assert row.sizing is not None and row.sizing.groups_by_size == {4: 3} and row.sizing.measured == 3
    assert row.sizing.chosen is None and row.sizing.multiplier is None
