"""One attempt as it is recorded: rows of exact tokens, the commands it ran, the time it took.

    row = PROMPT + ACTION + (OBSERVATION + ACTION) ...          every token as it was sampled or encoded, never again

`sample` extends the last row of a conversation, or begins a new one (after a context reset the rows share the one
reward; `recorded_rows.py` says which rows are trained). Whoever decides what is asked next, the agent loop here
(`builtin_agent.py`) or a harness behind the endpoint (`endpoint/`), records with this class, so both give the same
trajectories. Raises RowFull, DeadlinePassed and InfrastructureFailure.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megathunder import tracing
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.agents.recorded_rows import RecordedRows, SampledTurn
from megathunder.rollout.agents.workspace import CommandResult, Workspace
from megathunder.rollout.servers.client import Generation
from megathunder.rollout.servers.engine import DeadlinePassed, Engine, EpisodeClock
from megathunder.rollout.servers.protocol import ParseAnswer, SamplingParams
from megathunder.speculation.origin import origin_of
from megathunder.tasks import ChatFormat, Message, Task
from megathunder.types import EndReason, Role, Row, Segment, Trajectory, TrajectoryId, TurnCompleted

TOLD_PARSER = "qwen25"  # of the calls that `tool_instructions` tell a policy to write
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
    """A sampled turn. `text` is without its end token and stop word; `ended`: its end token was sampled; `stop`: the
    stop word that ended it; a turn with neither was cut off (at `max_tokens` if `no_room`, else at `max_new_tokens`)
    and is not acted on. `row_tokens`: of its row up to its end."""

    text: str
    ended: bool
    no_room: bool
    generation: Generation
    stop: str = ""
    row_tokens: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it may be acted on."""
        return self.ended or bool(self.stop)


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
        self.sampled_turns = 0  # those aside included
        self._lane, self._engine, self._workspace, self._on_turn = lane, engine, workspace, on_turn
        self._rows = RecordedRows(self._announce)
        self._tool_s = 0.0
        self._started_s = time.monotonic()

    @property
    def turns(self) -> int:
        """Turns of the trajectory so far; those aside do not count."""
        return self._rows.turns

    def prompt_ids(self) -> list[int]:
        """The task's own prompt, with its examples, or its conversation."""
        if self.task.messages:
            return self.chat.opening_ids(self.task.messages)
        return self.chat.prompt_ids(self.task.prompt, *self.task.examples)

    def check_room(self, messages: Sequence[Message]) -> None:
        """Raise RowFull for texts that have too many characters for any row: to tokenise megabytes takes a minute, in
        which the event loop does nothing else."""
        if sum(len(m.content) for m in messages) > self.settings.rollout.max_tokens * self.chat.longest_token:
            raise RowFull

    async def sample(
        self,
        pending: Segment,
        max_new_tokens: int | None = None,
        *,
        conversation: int = 0,
        aside: bool = False,
        stop: Sequence[str] = (),
        keep_special: bool = False,
    ) -> Turn:
        """The next turn: after `pending` in the last row of `conversation`, or in a new row if that is a PROMPT.

        `aside`: it is recorded and not trained. A turn ends with the token that completes one of the `stop` words: what
        was sampled after it is no part of the turn. `keep_special`: its text shows special tokens."""
        config = self.settings.rollout
        known = () if pending.role is Role.PROMPT else self._rows.token_ids(conversation)
        context = known + pending.token_ids
        room = config.max_tokens - len(context)
        if room <= 0:
            raise RowFull
        wanted = min(config.max_new_tokens, max_new_tokens or config.max_new_tokens)
        with tracing.span(self._lane, "turn", turn=self.sampled_turns):
            generation = await self._generate(context, min(wanted, room))

        def text_of(sampled: Sequence[int]) -> str:
            return self.chat.action_text(sampled, keep_special=True) if keep_special else self.chat.action_text(sampled)

        generation, text, word = cut_at_stop(generation, self._text_tokens(generation), text_of, stop)
        turn = Turn(
            text=text,
            ended=not word and (config.ignore_eos or generation.token_ids[-1] in self.settings.end_token_ids),
            no_room=room < wanted,
            generation=generation,
            stop=word,
            row_tokens=context + generation.token_ids,
        )
        self._append_turn(pending, turn, conversation, aside)
        return turn

    def _text_tokens(self, generation: Generation) -> int:
        """How many of the sampled tokens come before the end token."""
        sampled, ends = generation.token_ids, self.settings.end_token_ids
        return next((at for at, token in enumerate(sampled) if token in ends), len(sampled))

    async def parse_tool_calls(self, text: str, tools: Sequence[dict[str, Any]]) -> ParseAnswer:
        """The calls of `tools` in a sampled text."""
        started_s = time.monotonic()
        found = await self._engine.parse_tool_calls(text, tools, self.tool_parser)
        self.clock.forgive(started_s)
        return found

    @property
    def tool_parser(self) -> str:
        """The parser's name; "" where the model writes no calls that are known."""
        return self._engine.tool_parser if self.chat.shows_tools else TOLD_PARSER

    async def run_command(self, command: str, limit_s: float | None = None) -> CommandResult:
        """Run one command in the sandbox, for at most `limit_s`, `command_timeout_s` and what is left of the time."""
        most_s = min(self.settings.command_timeout_s, self.clock.remaining_s)
        if most_s <= 0:
            raise DeadlinePassed
        started_s = time.monotonic()
        with tracing.span(self._lane, "tool", turn=self.sampled_turns - 1):
            result = await self._workspace.run(command, min(most_s, limit_s or most_s))
            waited_s = self._latency_s()
            await asyncio.sleep(waited_s)
        self._tool_s += result.wall_s + waited_s
        self.clock.forgive(started_s + result.wall_s + waited_s)
        if self.clock.remaining_s <= 0:
            raise DeadlinePassed
        return result

    def _turn_seed(self) -> int:
        return turn_seed(self.settings.seed, self.id._replace(update=self.settings.batch), self.sampled_turns)

    def _latency_s(self) -> float:
        """Of this turn's command, beyond what the sandbox took: the same under any schedule."""
        median_s = self.settings.rollout.command_latency_s
        if median_s == 0:
            return 0.0
        drawn = random.Random(self._turn_seed()).lognormvariate(0.0, 1.0)
        return min(median_s * min(drawn, LONGEST_LATENCY), max(0.0, self.clock.remaining_s))

    def trajectory(self, reason: EndReason) -> Trajectory:
        """What was recorded; the task's own prompt alone where nothing was sampled."""
        self._rows.finish()
        nothing = Row(segments=(Segment(role=Role.PROMPT, token_ids=tuple(self.prompt_ids())),))
        return Trajectory(
            id=self.id,
            task_id=self.task.id,
            rows=self._rows.trained or (nothing,),
            side_rows=self._rows.aside,
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

    def _append_turn(self, pending: Segment, turn: Turn, conversation: int, aside: bool) -> None:
        generation = turn.generation
        action = Segment(
            role=Role.ACTION,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
        )
        sampled = SampledTurn(
            segments=(pending, action),
            token_ids=turn.row_tokens,
            at_s=time.monotonic(),
            context_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )
        self.sampled_turns += 1
        self._rows.append(sampled, conversation, aside=aside)

    def _announce(self, number: int, row: int, turn: SampledTurn) -> None:
        completed = TurnCompleted(
            id=self.id,
            turn=number,
            row=row,
            segments=turn.segments,
            at_s=turn.at_s,
            context_tokens=turn.context_tokens,
            cached_tokens=turn.cached_tokens,
        )
        self._on_turn(completed, turn.token_ids)


def cut_at_stop(
    generation: Generation, tokens: int, text_of: Callable[[Sequence[int]], str], stop: Sequence[str]
) -> tuple[Generation, str, str]:
    """(what was sampled up to the token that completes a stop word, its text before that, the word or "").

    `tokens` of the generation are text. A prefix of a sample is a sample of the policy that stops there."""
    sampled = generation.token_ids
    text = text_of(sampled[:tokens])
    found = [(text.find(word), word) for word in stop if word in text]
    if not found:
        return generation, text, ""
    at, word = min(found)
    most = bisect.bisect_left(range(tokens), True, key=lambda n: word in text_of(sampled[: n + 1])) + 1
    cut = dataclasses.replace(
        generation,
        token_ids=sampled[:most],
        logprobs=generation.logprobs[:most],
        policy_versions=generation.policy_versions[:most],
        finish_reason="stop",
    )
    return cut, text[:at], word


def turn_seed(seed: int, trajectory: TrajectoryId, turn: int) -> int:
    """62 bits from (run seed, update, group, index, turn): the same run samples the same tokens under any schedule."""
    text = f"{seed} {trajectory} {turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
