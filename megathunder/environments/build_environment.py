"""The environment that `tasks.environment` names, and a try of it before anything starts. Raises ConfigError."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from megathunder.config.tasks import TasksConfig
from megathunder.environments.session import EnvironmentSession
from megathunder.errors import ConfigError, UserError
from megathunder.registry import ENVIRONMENTS
from megathunder.tasks import Task
from megathunder.user_code import UserCode


def environment_maker(config: TasksConfig) -> Callable[[], Any] | None:
    """What makes an instance, with [tasks.options] as keyword arguments where the source is not the user's own; None
    where the tasks have no environment."""
    if not config.environment:
        return None
    kind = ENVIRONMENTS.get(config.environment)
    if not callable(kind):
        raise ConfigError(
            f"environment {config.environment!r} is {kind!r:.80}",
            expected="a class, or a function that makes an instance",
            remedy="name the class",
        )
    options = dict(config.options) if ":" not in config.source else {}
    signature = inspect.signature(kind)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment {config.environment!r} has the signature {signature}: {error}",
            expected=f"a class that is made with {', '.join(options) or 'no arguments'} ([tasks.options])",
            remedy="correct [tasks.options], or the class",
        ) from None
    return lambda: kind(**options)


def open_environment(
    make: Callable[[], Any], config: TasksConfig, task: Task, code: UserCode, retries: int
) -> EnvironmentSession:
    """The session of one trajectory."""
    return EnvironmentSession(
        make,
        task,
        reference=config.environment,
        code=code,
        limit_s=config.environment_timeout_s,
        retries=retries,
    )


def check_environment(config: TasksConfig, task: Task) -> bool:
    """Make an instance, reset it with the row of `task` and read its tools; whether it gives a reward."""
    make = environment_maker(config)
    assert make is not None, "called where tasks.environment is set"

    async def attempt() -> tuple[str, float | None]:
        code = UserCode()
        try:
            session = open_environment(make, config, task, code, 0)
            first = await session.begin()
            await session.close()
            return first, session.reward
        finally:
            code.close()

    try:
        first, reward = asyncio.run(attempt())
    except UserError as error:
        raise ConfigError(
            f"{error.seen}\n  (tried with the row of task {task.id})",
            expected="reset(row) -> observation, then step(action) or tools",
            remedy=error.remedy,
        ) from None
    if not first and not task.prompt:
        raise ConfigError(
            f"environment {config.environment!r} says nothing at first, and the row of task {task.id} has no prompt",
            expected="a first observation from reset(row), or a column prompt",
            remedy="return a text from reset",
        )
    return reward is not None
