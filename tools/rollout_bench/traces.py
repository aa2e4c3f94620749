"""Traces of requests: recorded from agents at work on the shell tasks, and synthetic ones.

    recorded     every turn of real trajectories, in order, with the context it had
    repeating    long continuations of few prompts, each asked by a whole group, at a low temperature
    fresh        long continuations of prompts nobody asked before, at a temperature at which nothing recurs

A request carries its own sampling seed: every server that is asked draws the same tokens, so that work is equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.rollout.collector import Collector
from megathunder.rollout.speculation.origin import Origin
from megathunder.rollout.supervisor import ServerPool
from megathunder.rollout.wire import SamplingParams
from megathunder.sandbox import SandboxPool, grade
from megathunder.tasks import ChatFormat, build_source
from megathunder.types import Event, Role, Trajectory, TrajectoryCompleted

GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request of a trace."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float
    stop: tuple[int, ...]
    task: str

    def sampling(self, seed: int, update: int, index: int) -> SamplingParams:
        """As trajectory `index` of its task's group in `update` would send it."""
        group = f"u{update}/{self.task}"
        return SamplingParams(
            max_new_tokens=self.tokens,
            temperature=self.temperature,
            stop_token_ids=self.stop,
            ignore_eos=not self.stop,
            sampling_seed=seed,
            custom_params=Origin(trajectory=f"{group}/{index}", group=group, task=self.task),
        )


async def record(servers: ServerPool, model: Path, tasks: int, rollout: RolloutConfig, seed: int) -> list[Request]:
    """Every turn of GROUP attempts at each of `tasks` shell tasks, trajectories as they completed."""
    source = build_source(TasksConfig(source="shell", seed=seed))
    chosen = source.take(tasks)
    chat = ChatFormat(AutoTokenizer.from_pretrained(model))
    done: list[tuple[str, Trajectory]] = []

    def emit(event: Event) -> None:
        if isinstance(event, TrajectoryCompleted):
            done.append((chosen[event.trajectory.id.group].id, event.trajectory))

    sandboxes = SandboxPool(SandboxConfig())
    await sandboxes.start()
    try:
        async with Collector(
            rollout, SandboxConfig(), servers=servers, sandboxes=sandboxes, grade=grade, chat=chat, seed=seed
        ) as collector:
            await collector.collect(0, 0, [[task] * GROUP for task in chosen], emit)
    finally:
        await sandboxes.close()
    return [request for task, trajectory in done for request in _turns(task, trajectory, rollout, chat)]


def _turns(task: str, trajectory: Trajectory, rollout: RolloutConfig, chat: ChatFormat) -> list[Request]:
    context: tuple[int, ...] = ()
    requests = []
    for segment in trajectory.rows[0].segments:
        if segment.role is Role.ACTION:
            request = Request(
                prompt=context,
                tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                stop=(chat.end_token_id,),
                task=task,
            )
            requests.append(request)
        context += segment.token_ids
    return requests


def repeating(
    vocabulary: int, seed: int, *, tasks: int = 12, tokens: int = 96, temperature: float = 0.7
) -> list[Request]:
    """GROUP requests for each of `tasks` prompts, groups one after the other."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(1, vocabulary) for _ in range(24)) for _ in range(tasks)]
    return [
        Request(prompt=prompt, tokens=tokens, temperature=temperature, stop=(), task=f"repeating-{i}")
        for i, prompt in enumerate(prompts)
        for _ in range(GROUP)
    ]


def fresh(
    vocabulary: int, seed: int, *, requests: int = 96, tokens: int = 96, temperature: float = 5.0
) -> list[Request]:
    """Every prompt once."""
    rng = random.Random(seed)
    return [
        Request(
            prompt=tuple(rng.randrange(1, vocabulary) for _ in range(24)),
            tokens=tokens,
            temperature=temperature,
            stop=(),
            task=f"fresh-{seed}-{i}",
        )
        for i in range(requests)
    ]
