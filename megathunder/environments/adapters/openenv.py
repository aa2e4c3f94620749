"""Environment servers that speak OpenEnv's protocol: `tasks.environment` = "openenv".

    [tasks]                                  [tasks.options]
    source = "seeds"                         url = "http://127.0.0.1:8000"
    environment = "openenv"                  action = "message"        observation = "echoed_message"

The policy's turn is sent in the field `action`; it is shown the field `observation` (without one: the whole observation
as JSON). The row's column `seed`, where it has one, goes to reset.
"""

from __future__ import annotations

import json
from typing import Any

from megathunder.environments.adapters.packages import optional_package
from megathunder.registry import ENVIRONMENTS

Step = tuple[str, float, bool]


@ENVIRONMENTS.register("openenv")
class OpenEnvEnvironment:
    """One session with the server at `url`."""

    def __init__(self, url: str, action: str = "message", observation: str = "") -> None:
        self._url, self._action, self._observation = url, action, observation

    def reset(self, row: dict[str, Any]) -> str:
        """Connect, and begin an episode."""
        package = optional_package("openenv.core.generic_client", "openenv")
        self._client = package.GenericEnvClient(base_url=self._url).sync()
        self._client.connect()
        result = self._client.reset(**({"seed": row["seed"]} if "seed" in row else {}))
        return self._text(result.observation)

    def step(self, action: str) -> Step:
        """What the server says to the policy's turn."""
        result = self._client.step({self._action: action})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _text(self, observation: Any) -> str:
        if self._observation and isinstance(observation, dict):
            observation = observation.get(self._observation, observation)
        return observation if isinstance(observation, str) else json.dumps(observation, default=str)
