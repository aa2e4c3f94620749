"""The functions of [reward], resolved: what they are called, how they are called, and what they may ask for.

A function takes (completion, row, trajectory), or (completions, rows, trajectories) and is then asked for batches. A
keyword-only parameter `context` gets a RewardContext: settings, sandboxes, the task's own grader. Called by scorer.py
and check_rewards.py. Raises ConfigError.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megathunder.config.reward import RewardConfig
from megathunder.errors import ConfigError
from megathunder.registry import REWARDS
from megathunder.sandbox.interface import Leases
from megathunder.tasks import Task

CONTEXT = "context"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a built-in function may ask for. `grade_task` runs the grader that the task itself names."""

    settings: RewardConfig
    task: Task
    sandboxes: Leases
    budget_s: float
    grade_task: Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReward:
    """A function of [reward]. `reference` is what the settings call it, `name` what its part is called."""

    reference: str
    name: str
    function: Callable[..., Any]
    weight: float
    batched: bool
    wants_context: bool

    @property
    def is_own(self) -> bool:
        """Whether it is code of the user's."""
        return ":" in self.reference

    def __str__(self) -> str:
        return f"reward {self.reference!r}"


def reward_functions(config: RewardConfig) -> tuple[NamedReward, ...]:
    """The functions that `config` names, in its order."""
    if config.weights and len(config.weights) != len(config.function):
        raise ConfigError(
            f"reward.weights has {len(config.weights)} numbers, reward.function {len(config.function)} names",
            expected="a weight per function, or none",
            remedy="give reward.weights a number per function",
        )
    found: list[NamedReward] = []
    for position, reference in enumerate(config.function):
        function = REWARDS.get(reference)
        parameters = _parameters(function)
        name = reference.rpartition(":")[2]
        found.append(
            NamedReward(
                reference=reference,
                name=name if all(name != other.name for other in found) else f"{name}_{position}",
                function=function,
                weight=config.weights[position] if config.weights else 1.0,
                batched=bool(parameters) and parameters[0] == "completions",
                wants_context=CONTEXT in parameters,
            )
        )
    return tuple(found)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except ValueError:  # a C function tells nothing
        return []
