"""The user's own parts, tried before anything starts: tasks are read, rewards called, agents found.

Called by the process that starts the others, before the run folder is made. Raises ConfigError.
"""

from __future__ import annotations

import dataclasses

from megathunder.config import Config
from megathunder.config.tasks import KINDS
from megathunder.errors import ConfigError
from megathunder.registry import AGENTS
from megathunder.rewards.check_rewards import check_rewards
from megathunder.tasks import ListedSource, Task, build_source

BUILT_IN_AGENTS = ("builtin", "command")


def check_user_code(config: Config) -> None:
    """Raise ConfigError at the first of tasks, agent and reward that cannot work."""
    own_agent = config.rollout.agent not in BUILT_IN_AGENTS
    if own_agent:
        AGENTS.get(config.rollout.agent)
    if not (config.reward.function or config.tasks.environment or own_agent or config.tasks.source not in KINDS):
        return
    task = first_task(config)
    check_rewards(config.reward, task, decides_elsewhere=own_agent or bool(config.tasks.environment))


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
