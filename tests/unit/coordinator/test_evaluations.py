"""Evaluation during training: on the published version, at its cadence, and with no effect on what is learnt."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from test_loop import AnsweringLearner, recorded, settings

from benchmarks.comparison.alternation import AlternatingUpdates, Alternation, Recording
from benchmarks.comparison.replayed_rollouts import NoServers, ReplayedSupply, read_recorded
from megathunder.coordinator import coordinator as coordinator_module
from megathunder.coordinator.assembly import Parts
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.persistence import Persistence
from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.sizing import GroupSizes
from megathunder.evaluation import EVALUATION, score
from megathunder.evaluation.attempts import read_attempts
from megathunder.evaluation.history import forget_evaluations, read_evaluations
from megathunder.loop import train
from megathunder.metrics.row import MetricsRow
from megathunder.metrics.run_folder import RunFolder
from megathunder.tasks import ExactAnswer, Task
from megathunder.types import Differentiate, TakeStep, TrajectoryId, TrajectoryLost
from tests.unit.coordinator.recordings import trajectory_events

TASKS = [Task(id=f"held-{i}", kind="k", prompt="p", files=(), grading=ExactAnswer(answer="")) for i in range(4)]


class Evaluated(ReplayedSupply):
    """A replay that can be evaluated: task t is solved from version 2 t on; the last task's second attempt is lost."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.versions: list[int] = []

    def heldout(self) -> list[list[Task]]:
        return [[task, task] for task in TASKS]

    async def collect_rewards(self, rollouts: Rollouts, groups: range) -> None:
        self.versions.append(rollouts.policy_version)
        for t in range(len(TASKS)):
            for attempt in range(2):
                identity = TrajectoryId(EVALUATION, t, attempt)
                if (t, attempt) == (len(TASKS) - 1, 1):
                    rollouts.inbox.put_nowait(TrajectoryLost(id=identity, reason="the server died", at_s=1.0))
                    continue
                reward = float(rollouts.policy_version >= 2 * t)
                for event in trajectory_events(random.Random(0), identity, reward=reward):
                    rollouts.inbox.put_nowait(event)


def trained(
    path: Path, schedule: str, *, resumed: tuple[Path, int] | None = None, **run: object
) -> tuple[list[MetricsRow], AnsweringLearner, Evaluated, Path]:
    """Four updates of a recording; `resumed`: of the run in a folder, from the checkpoint after some updates on."""
    recording, folder = recorded(path / "recording", groups=3), path / f"run-{len(list(path.glob('run-*')))}"
    folder.mkdir()
    folder, done = resumed or (folder, 0)
    config = settings(schedule, run={"updates": 4, "evaluate_attempts": 2, **run})
    plan, fast = AlternatingUpdates(config, Alternation()), Recording(run=str(recording), speed=50.0)
    rows: list[MetricsRow] = []
    learner, supply = AnsweringLearner(), Evaluated(config, plan, fast, read_recorded(recording))
    monitor = SimpleNamespace(record=lambda event: None, refresh=lambda progress: None, row=rows.append)
    monitor.print = lambda text: None
    parts = Parts(
        config=config,
        plan=plan,
        monitor=monitor,  # type: ignore[arg-type]
        supply=supply,
        persistence=Persistence(config=config, folder=RunFolder(folder), learner=learner),  # type: ignore
        servers=NoServers(),
        sizes=GroupSizes(config, chooses=False),
        learner=learner,  # type: ignore[arg-type]
        shape=None,  # type: ignore[arg-type]
        peak_flops=0.0,
        publishes=False,
        devices=3,
    )

    async def loaded(*_: object) -> None:
        """The learner and the tasks are where the checkpoint left them."""

    async def body() -> None:
        coordinator = Coordinator(config=config, parts=parts)
        if resumed:
            state = SimpleNamespace(update=done, policy_version=done, elapsed_s=1.0)
            found = SimpleNamespace(folder=folder, state=state, changed=())
            with (
                patch.object(coordinator_module, "find_resumption", lambda *_: found),
                patch.object(Persistence, "load", loaded),
            ):
                await coordinator.begin()
        else:
            await coordinator.begin()
        await train(coordinator)

    asyncio.run(body())
    return rows, learner, supply, folder


def learnt(learner: AnsweringLearner) -> tuple[list[object], list[object]]:
    """Every row the learner was given, and every step; into which micro-batches rows fall depends on the clock."""
    work = [c for c in learner.commands if isinstance(c, Differentiate)]
    rows = sorted((row.source, row.token_ids, row.loss_mask, row.engine_logprobs) for c in work for row in c.rows)
    steps = [(c.update, c.normaliser, c.skip) for c in learner.commands if isinstance(c, TakeStep)]
    return rows, steps


def test_an_evaluated_run_learns_what_an_unevaluated_one_learns(tmp_path: Path) -> None:
    for schedule in ("sync", "thundersync", "one_step_off"):
        path = tmp_path / schedule
        path.mkdir()
        rows, learner, supply, _ = trained(path, schedule, evaluate_every=1, evaluate_at_start=True)
        plain_rows, plain, unasked, _ = trained(path, schedule)
        assert learnt(learner) == learnt(plain) and len(learnt(plain)[0]) == 4 * 12
        assert [r.contributions_applied for r in rows] == [r.contributions_applied for r in plain_rows]
        assert supply.versions == [0, 1, 2, 3, 4] and unasked.versions == []
        assert all(row.success_heldout is None for row in plain_rows)


def test_every_evaluation_is_kept_with_what_its_policy_had_cost(tmp_path: Path) -> None:
    rows, _, _, folder = trained(tmp_path, "thundersync", evaluate_every=3, evaluate_at_start=True)
    kept = read_evaluations(RunFolder(folder).evaluations)
    assert [(e.updates, e.policy_version) for e in kept] == [(0, 0), (3, 3), (4, 4)]
    hours = [sum(row.step_wall_s for row in rows[: e.updates]) * 3 / 3600 for e in kept]
    assert [round(e.device_hours - h, 9) for e, h in zip(kept, hours)] == [0, 0, 0]
    assert [e.score.right for e in kept] == [2, 4, 6] and all(e.score.sent == 8 for e in kept)
    assert [e.score.completed for e in kept] == [7, 7, 7]  # the lost one counts over all, and not over completed
    assert [row.success_heldout for row in rows] == [None, None, 4 / 7, 6 / 7]


def test_an_evaluation_that_a_stop_cut_off_is_made_once_on_resume(tmp_path: Path) -> None:
    run = {"evaluate_every": 2, "resume": True}
    for cut_off in (2, 4):
        path = tmp_path / str(cut_off)
        path.mkdir()
        *_, folder = trained(path, "thundersync", evaluate_every=2)
        kept = RunFolder(folder).evaluations
        forget_evaluations(kept, cut_off - 1)
        *_, supply, _ = trained(path, "thundersync", resumed=(folder, cut_off), **run)
        assert supply.versions == list(range(cut_off, 5, 2))
        assert len(kept.read_text().splitlines()) == 2
        assert [(e.updates, e.policy_version) for e in read_evaluations(kept)] == [(2, 2), (4, 4)]
        *_, supply, _ = trained(path, "thundersync", resumed=(folder, 4), **run)
        assert supply.versions == [], "an evaluation that was made is not made again"


def test_a_figure_is_computed_again_from_the_attempts_that_were_kept(tmp_path: Path) -> None:
    _, _, _, folder = trained(tmp_path, "thundersync", evaluate_every=3, evaluate_at_start=True)
    for evaluation in read_evaluations(RunFolder(folder).evaluations):
        attempts = read_attempts(RunFolder(folder).attempts_after(evaluation.updates))
        assert score(attempts, [row.k for row in evaluation.score.pass_at]) == evaluation.score
        assert sum(a.reward is None for a in attempts) == 1
        assert all(a.trajectory.sampled_tokens == a.sampled_tokens > 0 for a in attempts if a.reward is not None)
