"""One request for turns of the policy, and what it gets, in no provider's form.

chat_completions.py, anthropic_messages.py --TurnRequest--> session.py --Answer--> the same

Called by both HTTP forms and `session.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megathunder.tasks import Message, ToolCall

MOST_CHOICES = 64


class Refused(Exception):
    """A request that is not answered: the HTTP status, OpenAI's `code`, words for a person, and the field at fault."""

    def __init__(self, status: int, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field = status, code, message, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """`n` turns after `messages`. `tools` are function definitions as OpenAI has them; with `parses` False their calls
    stay text. `max_new_tokens` None: the run's. `aside`: recorded, not trained."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    parses: bool = True
    stop: tuple[str, ...] = ()
    n: int = 1
    max_new_tokens: int | None = None
    aside: bool = False

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].role == "assistant":
            raise Refused(
                400, "invalid_messages", "the last message must be one that the policy can answer", "messages"
            )
        if not 1 <= self.n <= MOST_CHOICES:
            raise Refused(400, "invalid_value", f"n is {self.n}: a number from 1 to {MOST_CHOICES}", "n")
        if "" in self.stop:
            raise Refused(400, "invalid_value", "an empty stop word", "stop")

    @property
    def tools_key(self) -> str:
        """The tools as they are told apart."""
        return json.dumps(self.tools, sort_keys=True) if self.tools else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One turn: text, calls of tools, and why it ended. `parse_error` says why a call in the text is none."""

    text: str
    finish: str  # stop, length or tool_calls, as OpenAI has them
    stop: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parse_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All choices of a request; `number` counts the answers of a session."""

    number: int
    choices: tuple[Choice, ...]
    prompt_tokens: int
    sampled_tokens: int


def positive(field: str, value: int | None) -> int | None:
    """A number of tokens as it was given, if it is one. Raises Refused."""
    if value is not None and value < 1:
        raise Refused(400, "invalid_value", f"{field} is {value}: a positive number, or leave it out", field)
    return value


def function_tool(name: object, description: object, parameters: object, field: str) -> dict[str, Any]:
    """A function definition as chat templates take it. Raises Refused."""
    if not isinstance(name, str) or not name:
        raise Refused(400, "invalid_value", "a tool without a name", field)
    if parameters is not None and not isinstance(parameters, dict):
        raise Refused(400, "invalid_value", f"the parameters of tool {name} are no JSON schema", field)
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}
