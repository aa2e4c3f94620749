"""Traces of requests: recorded from agents at work on the shell tasks, and synthetic ones.

    recorded     real trajectories, the turns of each in order, every turn with the context it had
    repeating    long continuations of few prompts, each asked by a whole group, at a low temperature
    fresh        long continuations of prompts nobody asked before, at a temperature at which nothing recurs

A trace is a list of trajectories, a trajectory the requests of its turns. A request carries its own sampling seed:
every server that is asked draws the same tokens, so that work is equal.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.rewards.grading import grade
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.sandbox import SandboxPool
from megathunder.speculation.origin import Origin
from megathunder.tasks import ChatFormat, build_source
from megathunder.types import Event, Role, Trajectory, TrajectoryCompleted

GROUP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn, of attempt `attempt` at a task."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float
    stop: tuple[int, ...]
    task: str
    attempt: int

    def sampling(self, seed: int, update: int) -> SamplingParams:
        """As its trajectory would send it, the attempts at a task being a group of `update`."""
        group = f"u{update}/{self.task}"
        return SamplingParams(
            max_new_tokens=self.tokens,
            temperature=self.temperature,
            stop_token_ids=self.stop,
            ignore_eos=not self.stop,
            sampling_seed=seed,
            custom_params=Origin(trajectory=f"{group}/{self.attempt}", group=group, task=self.task),
        )


Trace = list[tuple[Request, ...]]


async def record(servers: ServerPool, model: Path, tasks: int, rollout: RolloutConfig, seed: int) -> Trace:
    """GROUP attempts at each of `tasks` shell tasks, trajectories as they completed."""
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
    return [_turns(task, attempt, trajectory, rollout, chat) for attempt, (task, trajectory) in enumerate(done)]


def _turns(
    task: str, attempt: int, trajectory: Trajectory, rollout: RolloutConfig, chat: ChatFormat
) -> tuple[Request, ...]:
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
                attempt=attempt,
            )
            requests.append(request)
        context += segment.token_ids
    return tuple(requests)


def repeating(vocabulary: int, seed: int, *, tasks: int = 12, tokens: int = 96, temperature: float = 0.7) -> Trace:
    """GROUP trajectories of one turn for each of `tasks` prompts, groups one after the other."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(1, vocabulary) for _ in range(24)) for _ in range(tasks)]
    return [
        (
            Request(
                prompt=prompt, tokens=tokens, temperature=temperature, stop=(), task=f"repeating-{i}", attempt=attempt
            ),
        )
        for i, prompt in enumerate(prompts)
        for attempt in range(GROUP)
    ]


def fresh(vocabulary: int, seed: int, *, requests: int = 48, tokens: int = 48, temperature: float = 5.0) -> Trace:
    """Trajectories of one turn, every prompt once."""
    rng = random.Random(seed)
    return [
        (
            Request(
                prompt=tuple(rng.randrange(1, vocabulary) for _ in range(24)),
                tokens=tokens,
                temperature=temperature,
                stop=(),
                task=f"fresh-{seed}-{i}",
                attempt=0,
            ),
        )
        for i in range(requests)
    ]
