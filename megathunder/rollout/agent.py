"""One trajectory: prompt, sampled turn, command, observation, ... until an end with a reason.

    row = PROMPT + ACTION + (OBSERVATION + ACTION) ...          every token as it was sampled or encoded, never again

An action that the policy did not finish is never executed. The end reasons:

    ANSWERED    `submit X`                                MAX_TURNS   the last turn's command ran, nothing submitted
    MALFORMED   `max_new_tokens` without the end token    MAX_TOKENS  no room for another token of `max_tokens`
    DEADLINE    the trajectory's own time is used up      (INFRASTRUCTURE is a TrajectoryLost event, never a result)

Called by the collector. Raises InfrastructureFailure when retries and replays are used up.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from megathunder import tracing
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.client import Generation
from megathunder.rollout.engine import DeadlinePassed, Engine, EpisodeClock
from megathunder.rollout.wire import SamplingParams
from megathunder.rollout.workspace import CommandResult, Workspace
from megathunder.tasks import BoxedAnswer, ChatFormat, SubmitAnswer, Task, observation_text, parse_action
from megathunder.types import EndReason, Role, Row, Segment, Trajectory, TrajectoryId, TurnCompleted

OnTurn = Callable[[TurnCompleted, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What all trajectories of a batch share. `command_timeout_s` limits one command."""

    rollout: RolloutConfig
    command_timeout_s: float
    policy_version: int
    seed: int
    batch: int  # stands for the update in sampling seeds
    temperature: float


class Episode:
    """One attempt at `task`. `on_turn` gets every turn as it is fixed, with all tokens up to its end, [T]."""

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
        self._task, self._id, self._lane = task, trajectory, lane
        self._settings, self._engine, self._chat = settings, engine, chat
        self._workspace, self._on_turn = workspace, on_turn
        self._clock = EpisodeClock(settings.rollout.deadline_s)
        self._segments: list[Segment] = []
        self._pending = [Segment(role=Role.PROMPT, token_ids=tuple(chat.prompt_ids(task.prompt, *task.examples)))]
        self._turns = 0
        self._tool_s = 0.0
        self.answer: str | None = None

    async def run(self) -> Trajectory:
        """All tokens of the trajectory; `answer` is then what was submitted, if anything was."""
        started_s = time.monotonic()
        try:
            reason = await self._until_end()
        except DeadlinePassed:
            reason = EndReason.DEADLINE
        finally:
            self._engine.forget(self._id)
        segments = self._segments or self._pending[:1]
        return Trajectory(
            id=self._id,
            task_id=self._task.id,
            rows=(Row(segments=tuple(segments)),),
            end_reason=reason,
            started_s=started_s,
            completed_s=time.monotonic(),
            turns=self._turns,
            tool_s=self._tool_s,
        )

    async def _until_end(self) -> EndReason:
        config = self._settings.rollout
        while True:
            context = self._context()
            room = config.max_tokens - len(context)
            if room <= 0:
                return EndReason.MAX_TOKENS
            with tracing.span(self._lane, "turn", turn=self._turns):
                generation = await self._sample(context, min(config.max_new_tokens, room))
            self._fix_turn(generation, context)
            if not config.ignore_eos and generation.token_ids[-1:] != (self._chat.end_token_id,):
                return EndReason.MAX_TOKENS if room < config.max_new_tokens else EndReason.MALFORMED
            text = self._chat.action_text(self._until_end_token(generation.token_ids))
            if isinstance(self._task.grading, BoxedAnswer):
                self.answer = text
                return EndReason.ANSWERED
            action = parse_action(text)
            if isinstance(action, SubmitAnswer):
                self.answer = action.answer
                return EndReason.ANSWERED
            result = await self._run_command(action.command)
            if self._turns >= self._task.max_turns:
                return EndReason.MAX_TURNS
            shown = observation_text(result.output, config.observation_characters, result.notice)
            self._pending = [Segment(role=Role.OBSERVATION, token_ids=tuple(self._chat.observation_ids(shown)))]

    async def _sample(self, context: tuple[int, ...], max_new_tokens: int) -> Generation:
        config = self._settings.rollout
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self._settings.temperature,
            top_p=config.top_p,
            stop_token_ids=() if config.ignore_eos else (self._chat.end_token_id,),
            ignore_eos=config.ignore_eos,
            sampling_seed=turn_seed(self._settings.seed, self._id._replace(update=self._settings.batch), self._turns),
        )
        return await self._engine.generate(
            self._id, context, sampling, policy_version=self._settings.policy_version, clock=self._clock
        )

    def _fix_turn(self, generation: Generation, context: tuple[int, ...]) -> None:
        action = Segment(
            role=Role.ACTION,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            policy_versions=generation.policy_versions,
        )
        new = (*self._pending, action)
        self._segments.extend(new)
        self._pending = []
        turn = TurnCompleted(
            id=self._id,
            turn=self._turns,
            row=0,
            segments=new,
            at_s=time.monotonic(),
            context_tokens=generation.prompt_tokens,
            cached_tokens=generation.cached_tokens,
        )
        self._turns += 1
        self._on_turn(turn, context + generation.token_ids)

    async def _run_command(self, command: str) -> CommandResult:
        limit_s = min(self._settings.command_timeout_s, self._clock.remaining_s)
        if limit_s <= 0:
            raise DeadlinePassed
        started_s = time.monotonic()
        with tracing.span(self._lane, "tool", turn=self._turns - 1):
            result = await self._workspace.run(command, limit_s)
        self._tool_s += result.wall_s
        self._clock.forgive(started_s + result.wall_s)
        if self._clock.remaining_s <= 0:
            raise DeadlinePassed
        return result

    def _context(self) -> tuple[int, ...]:
        return tuple(t for s in (*self._segments, *self._pending) for t in s.token_ids)

    def _until_end_token(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        end = self._chat.end_token_id
        return token_ids[: token_ids.index(end)] if end in token_ids else token_ids


def turn_seed(seed: int, trajectory: TrajectoryId, turn: int) -> int:
    """62 bits from (run seed, update, group, index, turn): the same run samples the same tokens under any schedule."""
    text = f"{seed} {trajectory} {turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 2
