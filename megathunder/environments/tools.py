"""Methods as tools: their definitions, the calls in a policy's turn, and what a call gives.

    <tool_call>{"name": "guess", "arguments": {"number": 5}}</tool_call>        as Qwen, Hermes and others write them

Definitions are those of `transformers.utils.get_json_schema` (type hints, and a docstring with an `Args:` section). A
call that cannot be read, names no tool or has wrong arguments is the policy's fault: it is told so and goes on.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from megathunder.errors import ConfigError

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
NOT_TOOLS = frozenset({"reset", "step", "reward", "done", "close", "setup"})
INSTRUCTIONS = """You may call functions. Their definitions:
<tools>
{tools}
</tools>

For each call write a JSON object between tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class ToolError(Exception):
    """Raised by a tool: the text is shown to the policy, and the episode goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the policy wrote. `error` says what is wrong with it, where it cannot be made."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def tool_methods(instance: object) -> dict[str, Callable[..., Any]]:
    """The public methods of `instance` that are tools, by name."""
    named = ((name, getattr(type(instance), name, None)) for name in dir(type(instance)))
    return {
        name: getattr(instance, name)
        for name, member in named
        if not name.startswith("_") and name not in NOT_TOOLS and callable(member) and not inspect.isclass(member)
    }


def tool_definitions(methods: dict[str, Callable[..., Any]], where: str) -> list[dict[str, Any]]:
    """OpenAI's function definitions. Raises ConfigError for a method without type hints or a docstring."""
    from transformers.utils import get_json_schema  # seconds to import

    found = []
    for name, method in methods.items():
        try:
            definition = get_json_schema(method)
        except Exception as error:  # of the docstring or of the type hints, each with a class of its own
            raise ConfigError(
                f"{where}: {name}{inspect.signature(method)} is no tool: {str(error).splitlines()[0]}",
                expected="type hints, and a docstring with a line for each argument below `Args:`",
                remedy=f"complete it, or rename it _{name} if the policy must not call it",
            ) from None
        definition["function"].pop("return", None)
        found.append(definition)
    return found


def tool_instructions(definitions: list[dict[str, Any]]) -> str:
    """What tells the policy its tools, where its chat template has no place for them."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(definition) for definition in definitions))


def tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order; unreadable ones have an error."""
    return [_call(body) for body in CALL.findall(text)]


def _call(body: str) -> ToolCall:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(name="", arguments={}, error=f"the call is no JSON: {error}")
    name = given.get("name") if isinstance(given, dict) else None
    arguments = given.get("arguments", {}) if isinstance(given, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name="", arguments={}, error='a call is {"name": "...", "arguments": {...}}')
    return ToolCall(name=name, arguments=arguments)


def converted(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` as the method's type hints say. Raises ToolError where they do not fit."""
    signature = inspect.signature(method, eval_str=True)
    try:
        signature.bind(**arguments)
        hints = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return {
            name: msgspec.convert(value, hints[name], strict=False) if name in hints else value
            for name, value in arguments.items()
        }
    except (TypeError, msgspec.ValidationError) as error:
        raise ToolError(str(error)) from None


def call_tool(methods: dict[str, Callable[..., Any]], call: ToolCall) -> str:
    """What the call shows the policy. Raises what the tool itself raises, but for ToolError."""
    if call.error:
        return f"error: {call.error}"
    if call.name not in methods:
        return f"error: there is no function {call.name!r}; there are {', '.join(methods)}"
    try:
        result = methods[call.name](**converted(methods[call.name], call.arguments))
    except ToolError as error:
        return f"error: {error}"
    return result if isinstance(result, str) else "" if result is None else json.dumps(result, default=str)
