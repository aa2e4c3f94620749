"""One harness at one task: what it may ask, and what of it is recorded.

    complete(messages) -> the next turn of the policy          execute(command) -> what the sandbox shows
    end(answer)        -> over

A turn that was cut off is not acted on: no command runs until a whole one was sampled. Once a limit is reached,
requests are refused (403 for turns and time, 400 `context_length_exceeded` for tokens) and `limit` says which; what the
machinery fails ends the session with `failure`. Requests of one session are served one after the other; one that is
asked again because its answer did not arrive gets the same answer. Called by `server.py` and `episode.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from jinja2 import TemplateError

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.agents.recorder import RowFull, TrajectoryRecorder, Turn
from megathunder.rollout.endpoint.chat_completions import ExecAnswer, Refused, TaskAnswer
from megathunder.rollout.endpoint.conversation import Conversation
from megathunder.rollout.servers.engine import DeadlinePassed
from megathunder.tasks import Message
from megathunder.types import EndReason

OVER = {
    EndReason.MAX_TURNS: Refused(403, "max_turns", "the turns of this task are used up"),
    EndReason.DEADLINE: Refused(403, "deadline", "the time of this task is used up"),
    EndReason.MAX_TOKENS: Refused(400, "context_length_exceeded", "no room for another token (rollout.max_tokens)"),
}
CUT_OFF = Refused(409, "cut_off", "the last turn was cut off (finish_reason length): nothing of it is executed")


class Session:
    """`over` is set when nothing more will be answered; then `reason`, `answer` and `failure` are final."""

    def __init__(self, recorder: TrajectoryRecorder, model: str) -> None:
        self.recorder, self.model = recorder, model
        self.over = asyncio.Event()
        self.answer: str | None = None
        self.reason: EndReason | None = None
        self.limit: EndReason | None = None
        self.failure: InfrastructureFailure | None = None
        self._conversation = Conversation(recorder.chat)
        self._one = asyncio.Lock()
        self._worker: asyncio.Task[object] | None = None
        self._last: Turn | None = None
        self._undelivered: tuple[list[Message], Turn] | None = None

    @property
    def last_text(self) -> str:
        """What the policy said last; empty where it said nothing."""
        return self._last.text if self._last else ""

    @property
    def task(self) -> TaskAnswer:
        task = self.recorder.task
        return TaskAnswer(
            id=task.id,
            kind=task.kind,
            request=task.request or task.prompt,
            folder=task.folder,
            max_turns=task.max_turns,
            model=self.model,
        )

    async def complete(self, messages: Sequence[Message], max_new_tokens: int | None = None) -> Turn:
        """The policy's next turn. Raises Refused."""
        async with self._alone():
            given = list(messages)
            if self._undelivered is not None and self._undelivered[0] == given:
                return self._undelivered[1]
            if self.recorder.turns >= self.recorder.task.max_turns:
                raise self._reached(EndReason.MAX_TURNS)
            try:
                turn = await self.recorder.sample(self._conversation.place(given), max_new_tokens)
            except TemplateError as error:
                raise Refused(400, "invalid_messages", f"the chat template refuses them: {error}") from error
            except RowFull:
                raise self._reached(EndReason.MAX_TOKENS) from None
            except DeadlinePassed:
                raise self._finish(EndReason.DEADLINE) from None
            except InfrastructureFailure as failure:
                raise self._failed(failure) from failure
            self._conversation.answered(given, turn.text, self.recorder.row_ids, ended=turn.ended)
            self._last, self._undelivered = turn, (given, turn)
            return turn

    def delivered(self, turn: Turn) -> None:
        """The answer has left: the same request again would be another sample."""
        if self._undelivered is not None and self._undelivered[1] is turn:
            self._undelivered = None

    async def execute(self, command: str, limit_s: float | None) -> ExecAnswer:
        """Run a command in the task's sandbox. Raises Refused."""
        async with self._alone():
            if self._last is not None and not self._last.ended:
                raise CUT_OFF
            try:
                result = await self.recorder.run_command(command, limit_s)
            except DeadlinePassed:
                raise self._finish(EndReason.DEADLINE) from None
            except InfrastructureFailure as failure:
                raise self._failed(failure) from failure
            return ExecAnswer(
                output=result.output, exit_status=result.exit_status, wall_s=result.wall_s, notice=result.notice
            )

    async def end(self, answer: str | None, reason: str) -> None:
        """The harness is done. Raises Refused for a reason that is not its to give."""
        async with self._alone():
            if reason not in (EndReason.ANSWERED.value, EndReason.MALFORMED.value):
                raise Refused(400, "invalid_reason", f"reason {reason!r}: answered or malformed")
            if reason == EndReason.ANSWERED.value:
                self.answer, self.reason = answer or "", EndReason.ANSWERED
            else:
                self.reason = self.limit or EndReason.MALFORMED
            self.over.set()

    async def stop(self) -> None:
        """Nothing is sampled, run or recorded from here on; what is under way is given up."""
        self.over.set()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait((self._worker,))

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One request at a time, while the session is open."""
        async with self._one:
            if self.over.is_set():
                raise OVER.get(self.reason, Refused(403, "over", "the session is over"))
            self._worker = asyncio.current_task()
            try:
                yield
            finally:
                self._worker = None

    def _reached(self, limit: EndReason) -> Refused:
        self.limit = limit
        return OVER[limit]

    def _finish(self, reason: EndReason) -> Refused:
        self.reason = reason
        self.over.set()
        return OVER[reason]

    def _failed(self, failure: InfrastructureFailure) -> Refused:
        self.failure = failure
        self.over.set()
        return Refused(503, "infrastructure", str(failure))
