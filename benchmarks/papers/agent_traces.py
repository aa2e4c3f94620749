"""Traces of agents for placement: what each turn adds to a context, and how long the agent is away between turns.

    context of turn k = prompt + (action + observation) of turns before k          tokens
    gap_s of turn k   = tool time before it: the server holds the prefix, or not, meanwhile

`synthetic` makes groups of agents that share a prompt; the same seed gives the same trace. Used by `placement.py` on a
virtual clock and by `benchmarks/bench_rollout.py` in front of real servers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from megathunder.types import TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """`observation` is what the agent read before this turn (none before the first)."""

    gap_s: float
    observation: tuple[int, ...]
    action_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTrace:
    """One trajectory."""

    id: TrajectoryId
    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> int:
        """At its end."""
        return len(self.prompt) + sum(len(turn.observation) + turn.action_tokens for turn in self.turns)


def synthetic(
    *,
    groups: int,
    group_size: int,
    turns: tuple[int, int] = (4, 8),
    prompt_tokens: int = 120,
    observation_tokens: int = 160,
    action_tokens: int = 16,
    mean_gap_s: float = 0.4,
    vocabulary: tuple[int, int] = (10, 2000),
    seed: int = 0,
) -> tuple[AgentTrace, ...]:
    """Agents with between `turns` turns (uniform) and exponential gaps."""
    chance = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(*vocabulary) for _ in range(length))

    def agent(group: int, index: int, prompt: tuple[int, ...]) -> AgentTrace:
        made = [
            Turn(
                gap_s=chance.expovariate(1 / mean_gap_s) if number else 0.0,
                observation=tokens(observation_tokens) if number else (),
                action_tokens=action_tokens,
            )
            for number in range(chance.randint(*turns))
        ]
        return AgentTrace(id=TrajectoryId(0, group, index), prompt=prompt, turns=tuple(made))

    prompts = [tokens(prompt_tokens) for _ in range(groups)]
    return tuple(agent(group, index, prompts[group]) for group in range(groups) for index in range(group_size))
