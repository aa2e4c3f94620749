"""One harness at one task: what it may ask, and what of it is recorded.

    complete(request) -> the next turns of the policy          execute(command) -> what the sandbox shows
    end(answer)       -> over

A turn that was cut off is not acted on: no command runs until a whole one was sampled. Once a limit is reached,
requests are refused (403 for turns and time, 400 `context_length_exceeded` for tokens) and `limit` says which; what the
machinery fails ends the session with `failure`. Requests of one session are served one after the other; one that is
asked again because its answer did not arrive gets the same answer. Called by `server.py` and `episode.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from jinja2 import TemplateError

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.agents.environment_agent import opening_ids
from megathunder.rollout.agents.recorder import RowFull, TrajectoryRecorder, Turn
from megathunder.rollout.endpoint.chat_completions import EndRequest, ExecAnswer, TaskAnswer
from megathunder.rollout.endpoint.conversation import ASSISTANT, Conversations, Position
from megathunder.rollout.endpoint.requests import Answer, Choice, Refused, TurnRequest
from megathunder.rollout.servers.engine import DeadlinePassed
from megathunder.tasks import Message, ToolCall
from megathunder.types import EndReason, Role, Segment

OVER = {
    EndReason.MAX_TURNS: Refused(403, "max_turns", "the turns of this task are used up"),
    EndReason.DEADLINE: Refused(403, "deadline", "the time of this task is used up"),
    EndReason.MAX_TOKENS: Refused(400, "context_length_exceeded", "no room for another token (rollout.max_tokens)"),
}
CUT_OFF = Refused(409, "cut_off", "the last turn was cut off (finish_reason length): nothing of it is executed")
UNPARSED = "the text opens a tool call that is no call of one of the tools: no JSON, or a name that none of them has"


class Session:
    """`over` is set when nothing more will be answered; then `reason`, `answer`, `reward` and `failure` are final."""

    def __init__(self, recorder: TrajectoryRecorder, model: str) -> None:
        self.recorder, self.model = recorder, model
        self.over = asyncio.Event()
        self.answer: str | None = None
        self.reward: float | None = None
        self.reason: EndReason | None = None
        self.limit: EndReason | None = None
        self.failure: InfrastructureFailure | None = None
        self._conversations = Conversations(recorder.chat)
        self._one = asyncio.Lock()
        self._worker: asyncio.Task[object] | None = None
        self._last: Turn | None = None  # of what is trained
        self._answers = 0
        self._calls = 0
        self._undelivered: tuple[TurnRequest, Answer] | None = None

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
            messages=tuple({"role": m.role, "content": m.content} for m in task.messages),
            metadata=task.row,
        )

    async def complete(self, request: TurnRequest) -> Answer:
        """The policy's next turns. Raises Refused."""
        async with self._alone():
            if self._undelivered is not None and self._undelivered[0] == request:
                return self._undelivered[1]
            if not request.aside and self.recorder.turns + request.n > self.recorder.task.max_turns:
                raise self._reached(EndReason.MAX_TURNS)
            self._check_tools(request)
            try:
                answer = await self._sample(request)
            except TemplateError as error:
                raise Refused(
                    400, "invalid_messages", f"the chat template refuses them: {error}", "messages"
                ) from error
            except RowFull:
                raise self._reached(EndReason.MAX_TOKENS) from None
            except DeadlinePassed:
                raise self._finish(EndReason.DEADLINE) from None
            except InfrastructureFailure as failure:
                raise self._failed(failure) from failure
            self._undelivered = (request, answer)
            return answer

    def count_tokens(self, request: TurnRequest) -> int:
        """Of the context that `request` brings. Raises Refused."""
        try:
            self.recorder.check_room(request.messages)
            return len(opening_ids(self.recorder.chat, request.messages, request.tools))
        except TemplateError as error:
            raise Refused(400, "invalid_messages", f"the chat template refuses them: {error}", "messages") from error
        except RowFull:
            raise OVER[EndReason.MAX_TOKENS] from None

    def delivered(self, answer: Answer) -> None:
        """The answer has left: the same request again would be another sample."""
        if self._undelivered is not None and self._undelivered[1] is answer:
            self._undelivered = None

    async def execute(self, command: str, limit_s: float | None = None) -> ExecAnswer:
        """Run a command in the task's sandbox. Raises Refused."""
        async with self._alone():
            if self._last is not None and not self._last.whole:
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

    async def end(self, request: EndRequest) -> None:
        """The harness is done. Raises Refused for a reason that is not its to give, and a reward that is no number."""
        async with self._alone():
            if request.reason not in (EndReason.ANSWERED.value, EndReason.MALFORMED.value):
                raise Refused(400, "invalid_reason", f"reason {request.reason!r}: answered or malformed", "reason")
            if request.reward is not None and not math.isfinite(request.reward):
                raise Refused(400, "invalid_value", f"reward {request.reward}: a finite number", "reward")
            self.reward = request.reward
            if request.reason == EndReason.ANSWERED.value:
                self.answer, self.reason = request.answer or "", EndReason.ANSWERED
            else:
                self.reason = self.limit or EndReason.MALFORMED
            self.over.set()

    async def stop(self) -> None:
        """Nothing is sampled, run or recorded from here on; what is under way is given up."""
        self.over.set()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.wait((self._worker,))

    # ------------------------------------------------------------------------------------------ private

    def _check_tools(self, request: TurnRequest) -> None:
        if request.tools and request.parses and not self.recorder.tool_parser:
            message = "how this model writes tool calls is not known: set rollout.tool_parser"
            raise Refused(400, "unsupported", message, "tools")

    async def _sample(self, request: TurnRequest) -> Answer:
        self.recorder.check_room(request.messages)
        position = self._conversations.locate(request.messages, request.tools, request.tools_key)
        choices, sampled, prompt = [], 0, 0
        for _ in range(request.n):
            turn = await self.recorder.sample(
                position.pending,
                request.max_new_tokens,
                conversation=position.conversation,
                aside=request.aside,
                stop=request.stop,
                keep_special=bool(request.tools),
            )
            choice = await self._choice(request, turn)
            said = Message(ASSISTANT, choice.text, choice.tool_calls)
            self._conversations.answered(
                request.messages,
                said,
                turn.row_tokens,
                ended=turn.ended,
                conversation=position.conversation,
                key=request.tools_key,
            )
            self._last = self._last if request.aside else turn
            choices.append(choice)
            context = turn.row_tokens[: -len(turn.generation.token_ids)]
            sampled, prompt = sampled + len(turn.generation.token_ids), len(context)
            position = Position(
                pending=Segment(role=Role.PROMPT, token_ids=context), conversation=position.conversation
            )
        self._answers += 1
        return Answer(number=self._answers, choices=tuple(choices), prompt_tokens=prompt, sampled_tokens=sampled)

    async def _choice(self, request: TurnRequest, turn: Turn) -> Choice:
        """What a turn says: the calls that SGLang's parser finds in it, or its text."""
        if not turn.whole:
            return Choice(text=turn.text, finish="length")
        if not (request.tools and request.parses):
            return Choice(text=turn.text, finish="stop", stop=turn.stop)
        found = await self.recorder.parse_tool_calls(turn.text, request.tools)
        if found.calls:
            calls = tuple(ToolCall(call.name, call.parameters, self._call_id()) for call in found.calls)
            return Choice(text=found.normal_text, finish="tool_calls", tool_calls=calls)
        error = UNPARSED if found.normal_text.strip() != turn.text.strip() else ""
        return Choice(text=turn.text, finish="stop", stop=turn.stop, parse_error=error)

    def _call_id(self) -> str:
        """Nine letters and digits, which is all that some templates take."""
        self._calls += 1
        return f"call{self._calls:05d}"

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
