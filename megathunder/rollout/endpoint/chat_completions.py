"""What harnesses send and get: the part of OpenAI's chat completions that a trained policy can honour, and two verbs.

    GET  /v1/models                POST /v1/chat/completions      (stream or not)
    GET  /v1/session               the task                       POST /v1/session/exec, /v1/session/end

Sampling is the run's own (temperature, top_p, seeds): what a request says of it is not obeyed, since tokens that were
sampled otherwise would not be the policy's. Lists of text parts are one text; what is left out here is ignored, except
that tools, several choices, stop words and images are refused. Called by `server.py`.
"""

from __future__ import annotations

import msgspec

from megathunder.tasks import Message

ROLES = {"developer": "system", "function": "tool"}  # as chat templates call them


class Refused(Exception):
    """A request that is not answered: the HTTP status, OpenAI's `code`, and words for a person."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str = ""


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[object] | None = None

    @property
    def canonical(self) -> Message:
        """Role and text as the template takes them. Raises Refused."""
        if self.tool_calls:
            raise Refused(400, "unsupported", "messages with tool_calls; the policy speaks text: use text actions")
        if isinstance(self.content, list):
            others = [part.type for part in self.content if part.type != "text"]
            if others:
                raise Refused(400, "unsupported", f"content of type {others[0]}; the policy reads text")
            return Message(ROLES.get(self.role, self.role), "".join(part.text for part in self.content))
        return Message(ROLES.get(self.role, self.role), self.content or "")


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[GivenMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    n: int | None = None
    stop: object = None
    tools: list[object] | None = None

    def checked(self) -> list[Message]:
        """The messages, if the request can be honoured. Raises Refused."""
        for what, asked in (("tools", self.tools), ("n above 1", (self.n or 1) > 1), ("stop", self.stop)):
            if asked:
                raise Refused(400, "unsupported", f"{what}: not supported; one text answer, ended by the policy itself")
        messages = [message.canonical for message in self.messages]
        if not messages or messages[-1].role == "assistant":
            raise Refused(400, "invalid_messages", "the last message must be one that the policy can answer")
        return messages

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/session/exec: a command for the sandbox of the session's task."""

    command: str
    timeout_s: float | None = None


class ExecAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`notice` names the limit that ended the command, if one did."""

    output: str
    exit_status: int
    wall_s: float
    notice: str = ""


class EndRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/session/end. `answer`: what is submitted ("" for work that lies in the sandbox); None with
    reason `malformed`: the policy did not speak the harness's format."""

    answer: str | None = None
    reason: str = "answered"


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/session."""

    id: str
    kind: str
    request: str
    folder: str
    max_turns: int
    model: str


def completion(model: str, number: int, text: str, finish: str, prompt: int, sampled: int) -> dict[str, object]:
    """Answer of a request that does not stream."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {**head(model, number, "chat.completion"), "choices": [choice], "usage": usage}


def chunks(model: str, number: int, text: str, finish: str) -> list[dict[str, object]]:
    """The events of a request that streams: the turn is sampled as a whole, and sent as one piece."""
    deltas = ({"role": "assistant", "content": ""}, {"content": text}, {})
    ends = (None, None, finish)
    return [
        {**head(model, number, "chat.completion.chunk"), "choices": [{"index": 0, "delta": d, "finish_reason": end}]}
        for d, end in zip(deltas, ends, strict=True)
    ]


def head(model: str, number: int, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 0, "model": model}
