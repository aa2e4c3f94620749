"""Anthropic's messages: the same turns in its form.

    POST /v1/messages (stream or not)      POST /v1/messages/count_tokens

Text, tool_use and tool_result blocks are read, thinking blocks passed over, all others refused. As with the other form,
sampling is the run's own and `tool_choice` a wish, except that "none" leaves calls as text. Called by `server.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from megathunder.rollout.endpoint.requests import Answer, Choice, Refused, TurnRequest, function_tool, positive
from megathunder.tasks import Message, ToolCall

PASSED_OVER = ("thinking", "redacted_thinking")
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One block of content, of any type that is read."""

    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool = False


class GivenMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[Block]

    def canonical(self) -> Iterator[Message]:
        """One message, after one for each tool's result. Raises Refused."""
        if isinstance(self.content, str):
            yield Message(self.role, self.content)
            return
        blocks = [block for block in self.content if block.type not in PASSED_OVER]
        known = ("text", "tool_use", "tool_result")
        if others := [block.type for block in blocks if block.type not in known]:
            raise Refused(400, "unsupported", f"content of type {others[0]}; the policy reads text", "messages")
        results = [block for block in blocks if block.type == "tool_result"]
        yield from (Message("tool", text_of(block.content), (), block.tool_use_id) for block in results)
        text = text_of([block for block in blocks if block.type == "text"])
        calls = tuple(ToolCall(b.name, json.dumps(b.input), b.id) for b in blocks if b.type == "tool_use")
        if text or calls or not results:
            yield Message(self.role, text, calls)


class GivenTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str = "custom"

    @property
    def canonical(self) -> dict[str, Any]:
        if self.type != "custom":
            raise Refused(400, "unsupported", f"a tool of type {self.type}: those of the client alone", "tools")
        return function_tool(self.name, self.description, self.input_schema, "tools")


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/messages."""

    messages: list[GivenMessage]
    model: str = ""
    system: str | list[Block] = ""
    max_tokens: int | None = None
    stream: bool = False
    stop_sequences: list[str] = []
    tools: list[GivenTool] = []
    tool_choice: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    def checked(self) -> TurnRequest:
        """The request, if it can be honoured. Raises Refused."""
        system = text_of(self.system)
        return TurnRequest(
            messages=(
                *([Message("system", system)] if system else ()),
                *(message for given in self.messages for message in given.canonical()),
            ),
            tools=tuple(tool.canonical for tool in self.tools),
            parses=self.tool_choice.get("type") != "none",
            stop=tuple(self.stop_sequences),
            max_new_tokens=positive("max_tokens", self.max_tokens),
            aside=self.metadata.get("conversation") == "side",
        )


def text_of(content: str | list[Block] | None) -> str:
    """The text of a content, all of whose blocks must be text. Raises Refused."""
    if isinstance(content, str) or content is None:
        return content or ""
    if others := [block.type for block in content if block.type != "text"]:
        raise Refused(400, "unsupported", f"content of type {others[0]}; the policy reads text", "messages")
    return "".join(block.text for block in content)


def message(model: str, answer: Answer) -> dict[str, object]:
    """The body of an answer that does not stream."""
    (choice,) = answer.choices
    return _head(model, answer) | {
        "content": _blocks(choice),
        "stop_reason": _reason(choice),
        "stop_sequence": choice.stop or None,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.sampled_tokens},
    }


def events(model: str, answer: Answer) -> list[dict[str, object]]:
    """The events of an answer that streams: a turn is sampled as a whole, and each block sent as one piece."""
    (choice,) = answer.choices
    started = _head(model, answer) | {"content": [], "stop_reason": None, "stop_sequence": None}
    started["usage"] = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    found: list[dict[str, object]] = [{"type": "message_start", "message": started}]
    for index, block in enumerate(_blocks(choice)):
        if block["type"] == "text":
            empty, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        found.append({"type": "content_block_start", "index": index, "content_block": empty})
        found.append({"type": "content_block_delta", "index": index, "delta": delta})
        found.append({"type": "content_block_stop", "index": index})
    ended = {"stop_reason": _reason(choice), "stop_sequence": choice.stop or None}
    found.append({"type": "message_delta", "delta": ended, "usage": {"output_tokens": answer.sampled_tokens}})
    return [*found, {"type": "message_stop"}]


def _head(model: str, answer: Answer) -> dict[str, object]:
    return {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": model}


def _reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stop else STOPS[choice.finish]


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """Arguments that are no JSON object come as they were written, under a name of their own."""
    text = [{"type": "text", "text": choice.text}] if choice.text or not choice.tool_calls else []
    return text + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in choice.tool_calls
    ]


def _object(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}
