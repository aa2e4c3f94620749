"""Runs attempts at tasks with the collector that training uses: same servers, agent loop, sandboxes and graders.

    attempt a of task t  ->  trajectory (EVALUATION, t, a), whose sampling seeds come from (run seed, t, a, turn)

So attempts are independent of each other, of training, and of which of them run together: an evaluation that is
resumed draws what an uninterrupted one draws. Called by tools/evaluate.py and the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from megathunder.evaluation.attempts import Attempt
from megathunder.tasks import Task
from megathunder.types import Event, Rewarded, Trajectory, TrajectoryCompleted, TrajectoryId, TrajectoryLost

EVALUATION = (1 << 31) - 1  # the "update" of evaluated trajectories: never one of a run


class Collects(Protocol):
    """What is used of rollout.Collector."""

    async def attempt(
        self,
        policy_version: int,
        work: Sequence[tuple[TrajectoryId, Task]],
        emit: Callable[[Event], None],
        *,
        batch: int,
        temperature: float | None = None,
        score: bool = True,
    ) -> None: ...


async def run_attempts(
    collector: Collects,
    tasks: Sequence[Task],
    attempts: int,
    on_end: Callable[[Attempt], None],
    *,
    policy_version: int,
    temperature: float | None = None,
    finished: Callable[[str, int], bool] = lambda task_id, number: False,
) -> None:
    """Make `attempts` attempts at each task but those that are `finished(task id, number)`; `on_end` gets each one as
    it is graded or lost."""
    work = [
        (TrajectoryId(EVALUATION, position, number), task)
        for position, task in enumerate(tasks)
        for number in range(attempts)
        if not finished(task.id, number)
    ]
    completed: dict[TrajectoryId, Trajectory] = {}

    def emit(event: Event) -> None:
        if isinstance(event, TrajectoryCompleted):
            completed[event.trajectory.id] = event.trajectory
        elif isinstance(event, Rewarded):
            trajectory = msgspec.structs.replace(completed.pop(event.id), reward=event.reward)
            on_end(Attempt.of(trajectory, tasks[event.id.group].kind))
        elif isinstance(event, TrajectoryLost):
            task = tasks[event.id.group]
            lost = Attempt(task_id=task.id, kind=task.kind, number=event.id.index, reward=None, error=event.reason)
            on_end(lost)

    await collector.attempt(policy_version, work, emit, batch=EVALUATION, temperature=temperature, score=False)
