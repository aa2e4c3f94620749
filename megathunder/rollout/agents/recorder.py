"""One attempt as it is recorded: rows of exact tokens, the commands it ran, the time it took.

    row = PROMPT + ACTION + (OBSERVATION + ACTION) ...          every token as it was sampled or encoded, never again

`sample` extends the last row, or begins the next one (a context reset: its rows share the one reward). Whoever decides
what is asked next, the agent loop here (`agent.py`) or a harness behind the endpoint (`endpoint/`), records with this
class, so both give the same trajectories. Raises RowFull, DeadlinePassed and InfrastructureFailure.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from megathunder import tracing
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.agents.workspace import CommandResult, Workspace
from megathunder.rollout.servers.client import Generation
from megathunder.rollout.servers.engine import DeadlinePassed, Engine, EpisodeClock
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.speculation.origin import origin_of
from megathunder.tasks import ChatFormat, Task
from megathunder.types import EndReason, Role, Row, Segment, Trajectory, TrajectoryId, TurnCompleted

LONGEST_LATENCY = 8.0  # medians
OnTurn = Callable[[TurnCompleted, tuple[int, ...]], None]


class RowFull(Exception):
    """No room for another token of `rollout.max_tokens`; an outcome of the policy, not a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What all trajectories of a batch share. `command_timeout_s` limits one command."""

    rollout: RolloutConfig
    command_timeout_s: float
    policy_version: int
    seed: int
    batch: int  # stands for the update in sampling seeds
    temperature: float
    end_token_ids: tuple[int, ...]  # any of them ends a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A sampled turn. `ended`: with the end token (else it was cut off and must not be acted on); `text`: without it;
    `no_room`: it was cut off by `max_tokens`, not by `max_new_tokens`."""

    text: str
    ended: bool
    no_room: bool
    generation: Generation


class TrajectoryRecorder:
    """`on_turn` gets every turn as it is fixed, with all tokens of its row up to its end, [T]."""

    def __init__(
        self,
        task: Task,
        trajectory: TrajectoryId,
        *,
        lane: str,
        settings: EpisodeSettings,
        engine: Engine,
        chat: ChatFormat,
        workspace: Workspace,
        on_turn: OnTurn,
    ) -> None:
        self.task, self.id, self.settings, self.chat = task, trajectory, settings, chat
        self.clock = EpisodeClock(task.attempt_s(settings.rollout.deadline_s))
        self.turns = 0
        self._lane, self._engine, self._workspace, self._on_turn = lane, engine, workspace, on_turn
        self._rows: list[list[Segment]] = []
        self._tool_s = 0.0
        self._started_s = time.monotonic()

    @property
    def row_ids(self) -> tuple[int, ...]:
        """All tokens of the last row."""
        return tuple(t for s in self._rows[-1] for t in s.token_ids) if self._rows else ()

    def prompt_ids(self) -> list[int]:
        """The task's own prompt, with its examples, or its conversation."""
        if self.task.messages:
            return self.chat.opening_ids(self.task.messages)
        return self.chat.prompt_ids(self.task.prompt, *self.task.examples)

    async def sample(self, pending: Segment, max_new_tokens: int | None = None) -> Turn:
        """The next turn: after `pending` in the last row, or in a new row if that is a PROMPT."""
        config = self.settings.rollout
        context = pending.token_ids if pending.role is Role.PROMPT else self.row_ids + pending.token_ids
        room = config.max_tokens - len(context)
        if room <= 0:
            raise RowFull
        wanted = min(config.max_new_tokens, max_new_tokens or config.max_new_tokens)
        with tracing.span(self._lane, "turn", turn=self.turns):
            generation = await self._generate(context, min(wanted, room))
        self._append_turn(pending, generation, context)
        sampled, ends = generation.token_ids, self.settings.end_token_ids
        whole = next((at for at, token in enumerate(sampled) if token in ends), len(sampled))
        return Turn(
            text=self.chat.action_text(sampled[:whole]),
            ended=config.ignore_eos or sampled[-1] in ends,
            no_room=room < wanted,
            generation=generation,
        )

    async def run_command(self, command: str, limit_s: float | None = None) -> CommandResult:
        """Run one command in the sandbox, for at most `limit_s`, `command_timeout_s` and what is left of the time."""
        most_s = min(self.settings.command_timeout_s, self.clock.remaining_s)
        if most_s <= 0:
            raise DeadlinePassed
        started_s = time.monotonic()
        with tracing.span(self._lane, "tool", turn=self.turns - 1):
            result = await self._workspace.run(command, min(most_s, limit_s or most_s))
            waited_s = self._latency_s()
            await asyncio.sleep(waited_s)
        self._tool_s += result.wall_s + waited_s
        self.clock.forgive(started_s + result.wall_s + waited_s)
        if self.clock.remaining_s <= 0:
            raise DeadlinePassed
        return result

    def _turn_seed(self) -> int:
        return turn_seed(self.settings.seed, self.id._replace(update=self.settings.batch), self.turns)

    def _latency_s(self) -> float:
        """Of this turn's command, beyond what the sandbox took: the same under any schedule."""
        median_s = self.settings.rollout.command_latency_s
        if median_s == 0:
            return 0.0
        drawn = random.Random(self._turn_seed()).lognormvariate(0.0, 1.0)
        return min(median_s * min(drawn, LONGEST_LATENCY), max(0.0, self.clock.remaining_s))

    def trajectory(self, reason: EndReason) -> Trajectory:
        """What was recorded; the task's own prompt alone where nothing was sampled."""
        nothing = [Segment(role=Role.PROMPT, token_ids=tuple(self.prompt_ids()))]
        return Trajectory(
            id=self.id,
            task_id=self.task.id,
            rows=tuple(Row(segments=tuple(segments)) for segments in self._rows or [nothing]),
            end_reason=reason,
            started_s=self._started_s,
            completed_s=time.monotonic(),
            turns=self.turns,
            tool_s=self._tool_s,
        )

    def release(self) -> None:
        """The attempt is over: its place at a server is free."""
        self._engine.release(self.id)

    async def _generate(self, context: tuple[int, ...], max_new_tokens: int) -> Generation:
        config = self.settings.rollout
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.settings.temperature,
            top_p=config.top_p,
            stop_token_ids=() if config.ignore_eos else self.settings.end_token_ids,
            ignore_eos=config.ignore_eos,
            custom_params=origin_of(self.id, self.task.id) if config.speculation != "off" else None,
            sampling_seed=self._turn_seed(),
        )
        return await self._engine.generate(
            self.id, context, sampling, policy_version=self.settings.policy_version, clock=self.clock
        )

    def _append_turn(self, pending: Segment, generation: Generation, context: tuple[int, ...]) -> None:
        if pending.role is Role.PROMPT:
            self._rows.append([])
        action = Segment(
            role=Role.ACTION,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
        )
        new = (pending, action)
        self._rows[-1].extend(new)
        row = len(self._rows) - 1
        turn = TurnCompleted(
            id=self.id,
            turn=self.turns,
            row=row,
            segments=new,
            at_s=time.monotonic(),
            context_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )
        self.turns += 1
        self._on_turn(turn, context + generation.token_ids)


def turn_seed(seed: int, trajectory: TrajectoryId, turn: int) -> int:
    """62 bits from (run seed, update, group, index, turn): the same run samples the same tokens under any schedule."""
    text = f"{seed} {trajectory} {turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
