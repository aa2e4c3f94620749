"""Which recorded tokens a list of messages stands for.

    the list extends the conversation that its last turn ended   -> OBSERVATION: the new messages, after that turn
    it extends a conversation that an earlier turn ended         -> PROMPT: the tokens recorded up to there + the new
                                                                    messages (a branch: a new row)
    anything else (history edited, shortened, another agent)     -> PROMPT: rendered as a whole (a new conversation)

History is never rendered where its tokens are known: what a turn sampled comes back as the ids that were sampled,
whatever the template makes of its text. Messages are the same if their roles, texts and calls are, blanks around what
the assistant said aside (harnesses strip them), and the ids of calls; other tools make another conversation. Which
conversations are trained is `recorded_rows.py`'s to say. Called by `session.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megathunder.rollout.agents.environment_agent import opening_ids
from megathunder.tasks import ChatFormat, Message
from megathunder.types import Role, Segment

ASSISTANT = "assistant"
Key = tuple[str, tuple[Message, ...]]  # tools, messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A conversation that a sampled turn ended: all tokens of its row, and whether the end token is among them."""

    token_ids: tuple[int, ...]  # [T]
    ended: bool
    conversation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the next turn stands: after `pending`, in `conversation` (numbered as they were opened)."""

    pending: Segment
    conversation: int


class Conversations:
    """The conversations of one session."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._known: dict[Key, Known] = {}
        self._last: dict[int, Key] = {}
        self._opened = 0

    def locate(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), key: str = "") -> Position:
        """What must come before the next turn; `key` tells `tools` apart. Raises what the chat template raises."""
        given = compared(messages)
        for end in range(len(given), 0, -1):
            if given[end - 1].role != ASSISTANT or (key, given[:end]) not in self._known:
                continue
            known = self._known[key, given[:end]]
            new = tuple(self._chat.continuation_ids(messages[end:], ended=known.ended))
            if (key, given[:end]) == self._last[known.conversation]:
                pending = Segment(role=Role.OBSERVATION, token_ids=new)
            else:
                pending = Segment(role=Role.PROMPT, token_ids=known.token_ids + new)
            return Position(pending=pending, conversation=known.conversation)
        opening = opening_ids(self._chat, messages, tools)
        return Position(pending=Segment(role=Role.PROMPT, token_ids=tuple(opening)), conversation=self._opened)

    def answered(
        self,
        messages: Sequence[Message],
        said: Message,
        token_ids: tuple[int, ...],
        *,
        ended: bool,
        conversation: int = 0,
        key: str = "",
    ) -> None:
        """A turn answered `messages` with `said`; `token_ids` [T] is its row up to its end."""
        last = (key, compared([*messages, said]))
        self._opened = max(self._opened, conversation + 1)
        self._last[conversation] = last
        self._known[last] = Known(token_ids=token_ids, ended=ended, conversation=conversation)


def compared(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages as they are told apart."""
    return tuple(
        Message(
            m.role,
            m.content.strip() if m.role == ASSISTANT else m.content,
            tuple(call._replace(id="", arguments=_canonical(call.arguments)) for call in m.tool_calls),
        )
        for m in messages
    )


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
