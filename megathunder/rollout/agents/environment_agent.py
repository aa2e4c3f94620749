"""One trajectory with an environment: prompt, sampled turn, what the environment says to it, ... until it is done.

    ANSWERED    the environment is done, or the policy called no tool        MAX_TURNS   the last turn was acted on
    MALFORMED   `max_new_tokens` without the end token                       MAX_TOKENS  no room for another token
    DEADLINE    the trajectory's own time is used up

A turn that the policy did not finish is not acted on. Called by the collector. Raises UserError and
InfrastructureFailure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megathunder.environments import EnvironmentSession
from megathunder.environments.tools import tool_instructions
from megathunder.rollout.agents.recorder import RowFull, TrajectoryRecorder
from megathunder.rollout.servers.engine import DeadlinePassed
from megathunder.tasks import ChatFormat, Message, Task
from megathunder.types import EndReason, Role, Segment, Trajectory


class EnvironmentEpisode:
    """One attempt. `answer` is the last turn's text, `reward` what the environment gave, once `run` has returned."""

    def __init__(self, recorder: TrajectoryRecorder, environment: EnvironmentSession) -> None:
        self._recorder, self._environment = recorder, environment
        self.answer: str | None = None

    @property
    def reward(self) -> float | None:
        return self._environment.reward

    async def run(self) -> Trajectory:
        """All tokens of the trajectory."""
        try:
            reason = await self._until_end()
        except DeadlinePassed:
            reason = EndReason.DEADLINE
        except RowFull:
            reason = EndReason.MAX_TOKENS
        finally:
            self._recorder.release()
        await self._environment.close()
        return self._recorder.trajectory(reason)

    async def _until_end(self) -> EndReason:
        recorder, environment = self._recorder, self._environment
        messages = opening_messages(recorder.task, await environment.begin())
        recorder.check_room(messages)
        token_ids = opening_ids(recorder.chat, messages, environment.tools)
        pending = Segment(role=Role.PROMPT, token_ids=tuple(token_ids))
        while True:
            turn = await recorder.sample(pending)
            if not turn.ended:
                return EndReason.MAX_TOKENS if turn.no_room else EndReason.MALFORMED
            self.answer = turn.text
            reply = await environment.act(turn.text)
            if recorder.clock.remaining_s <= 0:
                return EndReason.DEADLINE
            if reply.done:
                return EndReason.ANSWERED
            if recorder.turns >= recorder.task.max_turns:
                return EndReason.MAX_TURNS
            recorder.check_room(reply.messages)
            pending = Segment(role=Role.OBSERVATION, token_ids=tuple(recorder.chat.continuation_ids(reply.messages)))


def opening_messages(task: Task, first: str) -> list[Message]:
    """The task's conversation; the environment's first observation ends its last user message, or is one."""
    messages = [*task.messages] or ([Message("user", task.prompt)] if task.prompt else [])
    if not first:
        return messages
    if messages and messages[-1].role == "user":
        return [*messages[:-1], Message("user", f"{messages[-1].content}\n\n{first}")]
    return [*messages, Message("user", first)]


def opening_ids(chat: ChatFormat, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Their tokens; tools are said in the system message where the chat template has no place for them."""
    if not tools:
        return chat.opening_ids(messages)
    shown = chat.opening_ids(messages, tools)
    if shown != chat.opening_ids(messages):
        return shown
    system = "\n\n".join([*(m.content for m in messages if m.role == "system"), tool_instructions([*tools])])
    return chat.opening_ids([Message("system", system), *(m for m in messages if m.role != "system")])
