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
    ends = AttemptEnds(lambda where: tasks[where.group], on_end)
    await collector.attempt(policy_version, work, ends.event, batch=EVALUATION, temperature=temperature, score=False)


class AttemptEnds:
    """Rollout events on the one side, whole attempts on the other: `on_end` gets each as it is graded or lost."""

    def __init__(self, task_of: Callable[[TrajectoryId], Task], on_end: Callable[[Attempt], None]) -> None:
        self._task_of, self._on_end = task_of, on_end
        self._completed: dict[TrajectoryId, Trajectory] = {}

    def event(self, event: Event) -> None:
        """Take one event of an attempt."""
        if isinstance(event, TrajectoryCompleted):
            self._completed[event.trajectory.id] = event.trajectory
        elif isinstance(event, Rewarded):
            changes = {"reward": event.reward, "reward_parts": event.parts, "rewarded_s": event.at_s}
            trajectory = msgspec.structs.replace(self._completed.pop(event.id), **changes)
            self._on_end(Attempt.of(trajectory, self._task_of(event.id).kind))
        elif isinstance(event, TrajectoryLost):
            self._completed.pop(event.id, None)
            task, number = self._task_of(event.id), event.id.index
            self._on_end(Attempt(task_id=task.id, kind=task.kind, number=number, reward=None, error=event.reason))
