"""Environments: classes that answer the policy turn by turn, with state, one instance per trajectory.

    class Game:                                         steps: the policy's words are the action
        def reset(self, row) -> str: ...
        def step(self, action: str): return "warmer", 0.0, False

    class Shop:                                         tools: each public method with a docstring and type hints
        def buy(self, item: str) -> str: ...

Called by rollout/ (the agent loop). Refuses classes that are neither.
"""

from megathunder.environments.session import EnvironmentSession, Reply
from megathunder.environments.tools import ToolError

__all__ = ["EnvironmentSession", "Reply", "ToolError"]
