"""Rewards of trajectories by the functions of [reward]: weighted, in parts, tried again, never a 0 for a fault.

    reward = sum of weight * score over the functions          without functions: what the environment or the agent
                                                               gave, else the grader that the task names

A function's exception or silence is an infrastructure failure: it is tried `retries` times more and then ends the run
with its traceback (UserError), as does a result that is no finite number. Called by rollout/.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from megathunder.config.reward import RewardConfig
from megathunder.errors import UserError
from megathunder.rewards.batches import Batches
from megathunder.rewards.episode import FinishedEpisode, NotAScore, Score, score_of, total
from megathunder.rewards.functions import NamedReward, RewardContext, reward_functions
from megathunder.rewards.processes import RewardProcesses
from megathunder.sandbox.interface import Leases
from megathunder.tasks import Task
from megathunder.user_code import UserCode, UserCodeFailure

log = logging.getLogger(__name__)
GradeTask = Callable[[], Awaitable[float]]


class RewardScorer:
    """`async with RewardScorer(config.reward) as scorer:`."""

    def __init__(self, config: RewardConfig, *, retries: int = 2, budget_s: float = 60.0) -> None:
        self._config, self._retries, self._budget_s = config, retries, budget_s
        self._functions = reward_functions(config)
        self._code = UserCode(threads=config.threads)
        self._processes = {f.name: RewardProcesses(f, config) for f in self._functions if self._apart(f)}
        self._batches = {f.name: Batches(self._calls(f), config.batch_size) for f in self._functions if f.batched}

    async def __aenter__(self) -> RewardScorer:
        return self

    async def __aexit__(self, *exception: object) -> None:
        for processes in self._processes.values():
            await processes.close()
        self._code.close()

    async def score(
        self,
        task: Task,
        describe: Callable[[], FinishedEpisode],
        sandboxes: Leases,
        grade_task: GradeTask,
        environment_reward: float | None = None,
    ) -> Score:
        """The reward of a finished trajectory. `describe` makes its texts, which functions alone need; `grade_task`
        asks the task's own grader. Raises UserError and InfrastructureFailure."""
        if not self._functions:
            return Score(await grade_task() if environment_reward is None else environment_reward, {})
        episode = describe()
        context = RewardContext(
            settings=self._config, task=task, sandboxes=sandboxes, budget_s=self._budget_s, grade_task=grade_task
        )
        scores = await asyncio.gather(*(self._one(f, task, episode, context) for f in self._functions))
        if len(self._functions) == 1 and self._functions[0].weight == 1.0:
            return scores[0]
        parts: dict[str, float] = {}
        for function, score in zip(self._functions, scores, strict=True):
            parts[function.name] = score.reward
            parts |= {f"{function.name}.{name}": value for name, value in score.parts.items()}
        try:
            return Score(total(f.weight * s.reward for f, s in zip(self._functions, scores, strict=True)), parts)
        except NotAScore as wrong:
            raise _no_reward(", ".join(map(str, self._functions)), task, wrong) from None

    async def _one(self, function: NamedReward, task: Task, episode: FinishedEpisode, context: RewardContext) -> Score:
        for attempt in range(self._retries + 1):
            try:
                given = await self._given(function, task, episode, context)
                break
            except UserCodeFailure as failure:
                if attempt == self._retries:
                    raise failure.final(attempt + 1) from failure
                log.warning("task %s: %s; trying again", task.id, failure)
        try:
            return score_of(given)
        except NotAScore as wrong:
            raise _no_reward(str(function), task, wrong) from None

    async def _given(
        self, function: NamedReward, task: Task, episode: FinishedEpisode, context: RewardContext
    ) -> object:
        if function.wants_context:
            return await self._with_context(function, task, episode, context)
        if function.batched:
            return await self._batches[function.name].result(episode.completion, task.row, episode)
        return await self._calls(function)(episode.completion, task.row, episode)

    async def _with_context(
        self, function: NamedReward, task: Task, episode: FinishedEpisode, context: RewardContext
    ) -> object:
        """A built-in function: a coroutine runs here, since it waits for sandboxes and servers of this event loop."""

        def call() -> Any:
            return function.function(episode.completion, task.row, episode, context=context)

        if asyncio.iscoroutinefunction(function.function):
            return await call()
        return await self._code.call(str(function), call, limit_s=self._config.timeout_s, setting="reward.timeout_s")

    def _calls(self, function: NamedReward) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: object) -> Any:
            if function.name in self._processes:
                return await self._processes[function.name].call(*arguments)
            return await self._code.call(
                str(function),
                function.function,
                *arguments,
                limit_s=self._config.timeout_s,
                setting="reward.timeout_s",
            )

        return call

    def _apart(self, function: NamedReward) -> bool:
        """Whether it runs in processes: synchronous code of the user's, where the settings ask for that."""
        return self._config.processes > 0 and function.is_own and not asyncio.iscoroutinefunction(function.function)


def _no_reward(what: str, task: Task, wrong: NotAScore) -> UserError:
    return UserError(
        f"{what} on task {task.id}: {wrong}",
        expected="a finite number, or a dict of finite numbers",
        remedy="return a float; for a fault raise an exception",
    )
