"""How a task and a tool's output become tokens of the policy, and how the policy's text becomes an action.

    context = opening_ids(messages) + action + continuation_ids(messages) + action + continuation_ids(messages) + ...

A continuation is what the tokenizer's own chat template puts between the end-of-turn token of one assistant message and
the first token of the next, around the new messages alone: they are rendered after a stand-in conversation, of which
nothing is kept. So a template that edits its history (strips reasoning, trims, moves newlines) cannot change a token
that is already there. `prompt_ids` and `observation_ids` are the two for one user and one tool message; the wrapper of
an observation is read off once. Ids that were sampled are never re-tokenised; only messages of others pass through the
tokenizer. Text that spells a special token is broken with a blank, so that no program speaks as user or assistant.
Called by rollout/ (agent loop, endpoint), evaluation/ and tasks.training. Refuses tokenizers without a usable template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from megathunder.errors import ConfigError
from megathunder.tasks.task import Example, Message

SUBMIT = "submit"
EMPTY_OUTPUT = "-"
SHELL_NAME = "bash: line 1: "  # how bash -c begins its complaints
USER, ACTION, OUTPUT = "USER-TEXT", "ACTION-TEXT", "OUTPUT-TEXT"  # stand-ins while a template is read
TOOL = "tool_stand_in"


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token: str
    eos_token_id: int

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: object) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """The policy asks for a shell command."""

    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitAnswer:
    """The policy ends the episode with an answer (possibly empty)."""

    answer: str


Action = RunCommand | SubmitAnswer


def parse_action(text: str) -> Action:
    """`submit X` ends the episode with X; everything else is a command."""
    stripped = text.strip()
    word, _, rest = stripped.partition(" ")
    return SubmitAnswer(answer=rest.strip()) if word == SUBMIT else RunCommand(command=stripped)


def observation_text(output: str, characters: int, notice: str = "") -> str:
    """What the policy sees of a command's output: at most `characters` of its head, `-` for nothing; then `notice`,
    which no output can crowd out, on a line of its own."""
    shown = output.replace(SHELL_NAME, "").strip("\n")[:characters].rstrip("\n")
    return "\n".join(filter(None, (shown, notice))) or EMPTY_OUTPUT


def as_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it: the arguments of tool calls as values, as Hugging Face has them."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _value(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.call_id:
        shown["tool_call_id"] = message.call_id
    return shown


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments  # as the policy wrote it


class ChatFormat:
    """Prompt, observation and action of one tokenizer. `end_token_id` ends every sampled turn."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_token_id: int = tokenizer.eos_token_id
        specials = set(getattr(tokenizer, "all_special_tokens", ())) | {tokenizer.eos_token}
        self._specials = sorted((s for s in specials if len(s) > 1), key=len, reverse=True)
        self._before, self._after = self._observation_wrapper()

    def prompt_ids(self, prompt: str, *examples: Example) -> list[int]:
        """The tokens of a user message, after those of earlier questions and answers, and the opening of the first
        assistant turn."""
        turns = [turn for e in examples for turn in (Message("user", e.question), Message("assistant", e.answer))]
        return self.opening_ids([*turns, Message("user", prompt)])

    def opening_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The tokens of a whole conversation and the opening of the next assistant turn; `tools` are function
        definitions as OpenAI has them. Raises what the template raises on roles it does not know."""
        options = {"tools": [self._harmless_value(tool) for tool in tools]} if tools else {}
        return self._encode(self._render(self._given(messages), add_generation_prompt=True, **options))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template tells the policy which tools there are."""
        tool = {"type": "function", "function": {"name": TOOL, "description": "", "parameters": {"type": "object"}}}
        return TOOL in self._render([{"role": "user", "content": USER}], add_generation_prompt=True, tools=[tool])

    def continuation_ids(self, messages: Sequence[Message], *, ended: bool = True) -> list[int]:
        """The tokens after a sampled turn: the new messages and the opening of the next turn. A turn that was cut off
        (not `ended`) is closed with the end token first."""
        start = [Message("user", USER), Message("assistant", ACTION)]
        whole = self._render([*map(as_dict, start), *self._given(messages)], add_generation_prompt=True)
        _, _, rest = whole.partition(ACTION)
        _, end, rest = rest.partition(self._tokenizer.eos_token)
        return self._encode(rest if ended else end + rest)

    def observation_ids(self, output: str) -> list[int]:
        """The tokens after a sampled turn: the tool message (already cut) and the opening of the next turn."""
        return self._encode(self._before + self._harmless(output) + self._after)

    def action_text(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """The text of a sampled turn without its end token; special tokens (as some models open tool calls with) are
        left out, or kept."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)

    @cached_property
    def longest_token(self) -> int:
        """No token stands for more characters than this."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _given(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [self._harmless_value(as_dict(message)) for message in messages]

    def _harmless_value(self, value: Any) -> Any:
        """`value` with every text in it made harmless."""
        match value:
            case str():
                return self._harmless(value)
            case dict():
                return {self._harmless(str(name)): self._harmless_value(part) for name, part in value.items()}
            case list() | tuple():
                return [self._harmless_value(part) for part in value]
        return value

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _harmless(self, text: str) -> str:
        text = text.encode(errors="replace").decode()  # a lone surrogate, which no tokenizer takes, becomes "?"
        for special in self._specials:
            text = text.replace(special, special[:1] + " " + special[1:])
        return text

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def _observation_wrapper(self) -> tuple[str, str]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template",
                expected="a template that knows user, assistant and tool messages",
                remedy="use an instruction-tuned model, or put chat_template.jinja beside tokenizer.json",
            )
        start = [{"role": "user", "content": USER}, {"role": "assistant", "content": ACTION}]
        whole = self._render([*start, {"role": "tool", "content": OUTPUT}], add_generation_prompt=True)
        _, _, rest = whole.partition(ACTION)
        _, end, rest = rest.partition(self._tokenizer.eos_token)
        before, output, after = rest.partition(OUTPUT)
        if not (end and output):
            raise ConfigError(
                f"the chat template renders a tool message as {whole!r}",
                expected=f"the assistant's text, {self._tokenizer.eos_token}, then the tool's text",
                remedy="set eos_token to the token that ends an assistant turn, or mend the template",
            )
        return before, after
