"""The user's own parts, tried before anything starts: tasks are read, rewards called, agents found.

Called by the process that starts the others, before the run folder is made. Raises ConfigError.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from megathunder.config import Config
from megathunder.config.tasks import KINDS
from megathunder.environments.build_environment import check_environment
from megathunder.errors import ConfigError
from megathunder.registry import AGENTS
from megathunder.rewards.check_rewards import check_rewards
from megathunder.rollout.servers.tool_parsers import choose_tool_parser
from megathunder.tasks import ListedSource, Task, build_source

BUILT_IN_AGENTS = ("builtin", "command")


def check_user_code(config: Config) -> None:
    """Raise ConfigError at the first of tasks, agent and reward that cannot work."""
    choose_tool_parser(config.rollout.tool_parser, Path(config.learner.model))
    own_agent = config.rollout.agent not in BUILT_IN_AGENTS
    if own_agent and not inspect.iscoroutinefunction(AGENTS.get(config.rollout.agent)):
        raise ConfigError(
            f"rollout.agent = {config.rollout.agent!r} is no coroutine function",
            expected="async def run(task, client, sandbox) -> float | None",
            remedy="write async before def; client and sandbox are awaited",
        )
    if config.tasks.environment and config.rollout.agent != "builtin":
        raise ConfigError(
            f"rollout.agent = {config.rollout.agent!r} with tasks.environment = {config.tasks.environment!r}",
            expected="one of them: each decides what the policy is asked next",
            remedy='set rollout.agent = "builtin", or remove tasks.environment',
        )
    if not (config.reward.function or config.tasks.environment or own_agent or config.tasks.source not in KINDS):
        return
    task = first_task(config)
    rewarded = check_environment(config.tasks, task) if config.tasks.environment else own_agent
    check_rewards(config.reward, task, decides_elsewhere=rewarded)


def first_task(config: Config) -> Task:
    """One training task. Raises ConfigError where there is none."""
    tasks = config.tasks
    if tasks.source in KINDS and not tasks.path:  # a generated source makes all of its tasks at once
        tasks = dataclasses.replace(tasks, size=1)
    source = build_source(tasks)
    if isinstance(source, ListedSource):
        return source.parts[0][0]
    state = source.state()
    (task,) = source.take(1)
    source.restore(state)
    if not isinstance(task, Task):
        raise ConfigError(
            f"task source {tasks.source!r} gave {type(task).__name__} as a task",
            expected="megathunder.tasks.Task",
            remedy="let take return tasks",
        )
    return task
