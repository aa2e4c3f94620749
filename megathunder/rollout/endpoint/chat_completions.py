"""OpenAI's chat completions, as far as a trained policy can honour them, and the verbs of a session.

    GET  /v1/models                POST /v1/chat/completions      (stream or not)
    GET  /v1/session               the task                       POST /v1/session/exec, /v1/session/end

Sampling is the run's own (temperature, top_p, seeds, no grammar): what a request says of it is not obeyed, since tokens
that were sampled otherwise would not be the policy's. So `tool_choice` "required", or a function's name, is a wish.
Lists of text parts are one text; images are refused; fields that are not listed here are ignored. Called by
`server.py`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from megathunder.rollout.endpoint.requests import Answer, Choice, Refused, TurnRequest, function_tool, positive
from megathunder.tasks import Message, ToolCall

ROLES = {"developer": "system", "function": "tool"}  # as chat templates call them


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str = ""


class GivenFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class GivenCall(msgspec.Struct, frozen=True, kw_only=True):
    function: GivenFunction
    id: str = ""

    @property
    def canonical(self) -> ToolCall:
        given = self.function.arguments
        text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        return ToolCall(self.function.name, text, self.id)


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[GivenCall] | None = None
    tool_call_id: str | None = None

    @property
    def canonical(self) -> Message:
        """Role, text and calls as the template takes them. Raises Refused."""
        content = self.content or ""
        if isinstance(content, list):
            others = [part.type for part in content if part.type != "text"]
            if others:
                raise Refused(400, "unsupported", f"content of type {others[0]}; the policy reads text", "messages")
            content = "".join(part.text for part in content)
        calls = tuple(call.canonical for call in self.tool_calls or ())
        return Message(ROLES.get(self.role, self.role), content, calls, self.tool_call_id or "")


class GivenTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: dict[str, Any] = {}

    @property
    def canonical(self) -> dict[str, Any]:
        if self.type != "function":
            raise Refused(400, "unsupported", f"a tool of type {self.type}: functions alone", "tools")
        function = self.function
        return function_tool(function.get("name"), function.get("description"), function.get("parameters"), "tools")


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions. `metadata.conversation` "side" marks what is recorded and not trained."""

    messages: list[GivenMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    tools: list[GivenTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None

    def checked(self) -> TurnRequest:
        """The request, if it can be honoured. Raises Refused."""
        most = positive("max_completion_tokens", self.max_completion_tokens) or positive("max_tokens", self.max_tokens)
        return TurnRequest(
            messages=tuple(message.canonical for message in self.messages),
            tools=tuple(tool.canonical for tool in self.tools or ()),
            parses=self.tool_choice != "none",
            stop=tuple([self.stop] if isinstance(self.stop, str) else self.stop or ()),
            n=1 if self.n is None else self.n,
            max_new_tokens=most,
            aside=(self.metadata or {}).get("conversation") == "side",
        )

    @property
    def wants_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/session/exec: a command for the sandbox of the session's task, for at most `timeout_s`."""

    command: str
    timeout_s: float | None = None

    @property
    def checked_timeout_s(self) -> float | None:
        """Raises Refused for a time that is none; one longer than the run's limit is that limit."""
        if self.timeout_s is not None and not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            message = f"timeout_s is {self.timeout_s:g}: a positive number of seconds, or leave it out"
            raise Refused(400, "invalid_value", message, "timeout_s")
        return self.timeout_s


class ExecAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`notice` names the limit that ended the command, or for which it was not run."""

    output: str
    exit_status: int
    wall_s: float
    notice: str = ""


class EndRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/session/end. `answer`: what is submitted ("" for work that lies in the sandbox); None with
    reason `malformed`: the policy did not speak the harness's format. `reward`: the harness's own, in place of the
    task's grader; functions of [reward] see it and decide."""

    answer: str | None = None
    reason: str = "answered"
    reward: float | None = None


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/session. `messages`: the task's own conversation, where it has one; `metadata`: the row that it
    was read from."""

    id: str
    kind: str
    request: str
    folder: str
    max_turns: int
    model: str
    messages: tuple[dict[str, str], ...] = ()
    metadata: dict[str, Any] = {}


def completion(model: str, answer: Answer) -> dict[str, object]:
    """The body of an answer that does not stream."""
    choices = [
        {"index": i, "message": _message(c), "finish_reason": c.finish, "logprobs": None, **_error(c)}
        for i, c in enumerate(answer.choices)
    ]
    return {**_head(model, answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}


def chunks(model: str, answer: Answer, *, usage: bool) -> list[dict[str, object]]:
    """The events of an answer that streams: a turn is sampled as a whole, and sent as one piece."""
    head = _head(model, answer, "chat.completion.chunk")
    events: list[dict[str, object]] = []
    for i, choice in enumerate(answer.choices):
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": choice.text}] if choice.text else []
        deltas += [{"tool_calls": [call]} for call in _calls(choice, indexed=True)]
        pieces = [{"index": i, "delta": delta, "finish_reason": None} for delta in deltas]
        pieces.append({"index": i, "delta": {}, "finish_reason": choice.finish, **_error(choice)})
        events += [{**head, "choices": [piece]} for piece in pieces]
    return [*events, {**head, "choices": [], "usage": _usage(answer)}] if usage else events


def _message(choice: Choice) -> dict[str, object]:
    calls = {"tool_calls": _calls(choice, indexed=False)} if choice.tool_calls else {}
    return {"role": "assistant", "content": choice.text if choice.text or not calls else None, **calls}


def _calls(choice: Choice, *, indexed: bool) -> list[dict[str, object]]:
    return [
        {
            **({"index": i} if indexed else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for i, call in enumerate(choice.tool_calls)
    ]


def _error(choice: Choice) -> dict[str, str]:
    return {"tool_parse_error": choice.parse_error} if choice.parse_error else {}


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.sampled_tokens
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.sampled_tokens,
        "total_tokens": total,
    }


def _head(model: str, answer: Answer, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{answer.number}", "object": kind, "created": 0, "model": model}
