"""The grader that a task names, asked again when the machinery fails it; and a trajectory as its graders see it.

Called by the collector. Raises InfrastructureFailure when the replays are used up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rewards.episode import FinishedEpisode
from megathunder.rollout.agents.workspace import Sandbox, Sandboxes, Workspace
from megathunder.tasks import ChatFormat, Message, Task
from megathunder.types import Role, Trajectory

Grade = Callable[[Task, Sandbox, str | None, Sandboxes, float], Awaitable[float]]
log = logging.getLogger(__name__)
GRADING_GRACE_S = 30.0  # beyond the grader's own budget: leases and copies


class TaskGrader:
    """`grade` is rewards.grading.grade; `config.graders` of them run at once."""

    def __init__(self, grade: Grade, config: SandboxConfig, sandboxes: Sandboxes) -> None:
        self._grade, self._config, self._sandboxes = grade, config, sandboxes
        self._places, self._told_slow = asyncio.Semaphore(config.graders), False

    async def reward(self, task: Task, workspace: Workspace, answer: str | None) -> float:
        """0 without an answer where the task asks for one; a grader that the machinery fails is asked again in a
        replayed sandbox."""
        if answer is None and not task.judges_what_is_left:
            return 0.0
        budget_s = self._config.grading_budget_s
        while True:
            try:
                async with self._places, asyncio.timeout(budget_s + GRADING_GRACE_S):
                    started_s = time.monotonic()
                    given = await self._grade(task, await workspace.ready(), answer, self._sandboxes, budget_s)
                    self._say_if_slow(task, time.monotonic() - started_s)
                return finite(task, given)
            except InfrastructureFailure as failure:
                await workspace.fail(failure)
            except TimeoutError:
                await workspace.fail(InfrastructureFailure(f"grading exceeded {budget_s + GRADING_GRACE_S:.0f} s"))

    def _say_if_slow(self, task: Task, took_s: float) -> None:
        """Once: what does not end scores 0, and so does a test suite that the limit is too short for."""
        if took_s < self._config.grading_budget_s or self._told_slow:
            return
        self._told_slow = True
        log.warning(
            "the grader of task %s took %.0f s: what still runs after sandbox.grading_budget_s = %g earns 0. If its "
            "tests need longer, raise that or lower sandbox.max_grading (%d at once). Said once.",
            *(task.id, took_s, self._config.grading_budget_s, self._config.graders),
        )


def finite(task: Task, reward: object) -> float:
    """`reward`, if it is a finite number; anything else is a fault of the grader."""
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise InfrastructureFailure(f"the grader of task {task.id} gave {reward!r}, not a finite number")
    return float(reward)


def finished_episode(
    task: Task, trajectory: Trajectory, chat: ChatFormat, answer: str | None, reward: float | None
) -> FinishedEpisode:
    """`trajectory` as texts; of several rows (after context resets) the messages are those of the last."""
    begin = [m._asdict() for m in task.messages or (Message("user", task.prompt),)]
    roles = {Role.ACTION: "assistant", Role.OBSERVATION: "tool"}
    texts = [(s.role, chat.action_text(s.token_ids)) for s in trajectory.rows[-1].segments if s.role is not Role.PROMPT]
    spoken = [{"role": roles[role], "content": text} for role, text in texts]
    return FinishedEpisode(
        task_id=task.id,
        kind=task.kind,
        prompt=task.prompt,
        completion=next((text for role, text in reversed(texts) if role is Role.ACTION), ""),
        answer=answer,
        messages=(*begin, *spoken),
        turns=trajectory.turns,
        end_reason=trajectory.end_reason.value,
        sampled_tokens=trajectory.sampled_tokens,
        environment_reward=reward,
    )
