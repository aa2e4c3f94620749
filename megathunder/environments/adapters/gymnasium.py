"""Environments of gymnasium whose actions are texts or numbers: `tasks.environment` = "gymnasium".

    [tasks]                                  [tasks.options]
    source = "seeds"                         env = "Blackjack-v1"
    environment = "gymnasium"

The seed is the row's column `seed`; a column `env` names another environment than the options. An action of a discrete
space is the last whole number of the policy's turn; a turn without one, or with one out of range, is told so.
"""

from __future__ import annotations

import re
from typing import Any

from megathunder.environments.adapters.packages import optional_package
from megathunder.errors import ConfigError
from megathunder.registry import ENVIRONMENTS

NUMBER = re.compile(r"-?\d+")
Step = tuple[str, float, bool]


@ENVIRONMENTS.register("gymnasium")
class GymnasiumEnvironment:
    """One episode of the environment called `env`, with `options` of its own."""

    def __init__(self, env: str = "", **options: str) -> None:
        self._name, self._options = env, options

    def reset(self, row: dict[str, Any]) -> str:
        """Make it with the row's seed; its description and first observation."""
        package = optional_package("gymnasium", "environments")
        name = str(row.get("env") or self._name)
        try:
            self._env = package.make(name, **self._options)
        except package.error.Error as error:
            raise ConfigError(
                f"gymnasium has no environment {name!r}: {error}",
                expected="an id such as Blackjack-v1",
                remedy="[tasks.options] env = ..., or a column env",
            ) from None
        observation, _ = self._env.reset(seed=row.get("seed"))
        space = self._env.action_space
        self._discrete = isinstance(space, package.spaces.Discrete)
        if not self._discrete and not isinstance(space, package.spaces.Text):
            raise ConfigError(
                f"{name} has actions {space}",
                expected="a Discrete or Text space",
                remedy="wrap it in a class of your own",
            )
        if not self._discrete:
            return str(observation)
        self._first, self._last = int(space.start), int(space.start + space.n - 1)
        return f"{name}. {observation}\nReply with a number from {self._first} to {self._last}."

    def step(self, action: str) -> Step:
        """What gymnasium says; a reply that is no action costs a turn and changes nothing."""
        given: Any = action
        if self._discrete:
            numbers = NUMBER.findall(action)
            given = int(numbers[-1]) if numbers and len(numbers[-1]) < 10 else self._first - 1
            if not self._first <= given <= self._last:
                return f"Reply with a number from {self._first} to {self._last}.", 0.0, False
        observation, reward, terminated, truncated, _ = self._env.step(given)
        return str(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """End it."""
        self._env.close()
