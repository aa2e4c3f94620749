"""Single-player games of textarena: `tasks.environment` = "textarena".

    [tasks]                                  [tasks.options]
    source = "seeds"                         env = "GuessTheNumber-v0"
    environment = "textarena"

The seed is the row's column `seed`; a column `env` names another game than the options. The reward is the game's.
"""

from __future__ import annotations

import random
from typing import Any

from megathunder.environments.adapters.packages import optional_package
from megathunder.errors import ConfigError
from megathunder.registry import ENVIRONMENTS

Step = tuple[str, float, bool]


@ENVIRONMENTS.register("textarena")
class TextArenaEnvironment:
    """One game of `env`."""

    def __init__(self, env: str = "") -> None:
        self._name = env

    def reset(self, row: dict[str, Any]) -> str:
        """Begin the game with the row's seed; what the player is told."""
        package, name = optional_package("textarena", "environments"), str(row.get("env") or self._name)
        try:
            self._env = package.make(env_id=name)
        except ValueError as error:
            raise ConfigError(
                f"textarena has no game {name!r}: {error}",
                expected="an id such as GuessTheNumber-v0",
                remedy="[tasks.options] env = ..., or a column env",
            ) from None
        seed = row.get("seed")
        random.seed(seed)  # some games draw from the module's generator
        self._env.reset(num_players=1, seed=seed)
        return self._observation()

    def step(self, action: str) -> Step:
        """One move."""
        done, _ = self._env.step(action=action)
        if not done:
            return self._observation(), 0.0, False
        rewards, info = self._env.close()
        return str(info), float(rewards[0]), True

    def _observation(self) -> str:
        _, observation = self._env.get_observation()
        return observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)
