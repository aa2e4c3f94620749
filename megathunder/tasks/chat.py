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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megathunder.errors import ConfigError
from megathunder.tasks.task import Example, Message

SUBMIT = "submit"
EMPTY_OUTPUT = "-"
SHELL_NAME = "bash: line 1: "  # how bash -c begins its complaints
USER, ACTION, OUTPUT = "USER-TEXT", "ACTION-TEXT", "OUTPUT-TEXT"  # stand-ins while a template is read


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    eos_token: str
    eos_token_id: int

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: object) -> str: ...


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
        options = {"tools": [*tools]} if tools else {}
        return self._encode(self._render(self._given(messages), add_generation_prompt=True, **options))

    def continuation_ids(self, messages: Sequence[Message], *, ended: bool = True) -> list[int]:
        """The tokens after a sampled turn: the new messages and the opening of the next turn. A turn that was cut off
        (not `ended`) is closed with the end token first."""
        start = [Message("user", USER), Message("assistant", ACTION)]
        whole = self._render([*map(Message._asdict, start), *self._given(messages)], add_generation_prompt=True)
        _, _, rest = whole.partition(ACTION)
        _, end, rest = rest.partition(self._tokenizer.eos_token)
        return self._encode(rest if ended else end + rest)

    def observation_ids(self, output: str) -> list[int]:
        """The tokens after a sampled turn: the tool message (already cut) and the opening of the next turn."""
        return self._encode(self._before + self._harmless(output) + self._after)

    def action_text(self, token_ids: Sequence[int]) -> str:
        """The text of a sampled turn without its end token."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _given(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        return [{"role": message.role, "content": self._harmless(message.content)} for message in messages]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _harmless(self, text: str) -> str:
        for special in self._specials:
            text = text.replace(special, special[:1] + " " + special[1:])
        return text

    def _render(self, messages: list[dict[str, str]], **options: Any) -> str:
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
