"""Which recorded tokens a list of messages stands for.

    the list extends the conversation that the last turn ended   -> OBSERVATION: the new messages, after that turn
    it extends a conversation that an earlier turn ended         -> PROMPT: the tokens recorded up to there + the new
                                                                    messages (a branch: a new row)
    anything else (history edited, shortened, another agent)     -> PROMPT: rendered as a whole (a reset: a new row)

History is never rendered where its tokens are known: what a turn sampled comes back as the ids that were sampled,
whatever the template makes of its text. Messages are the same if their roles and texts are, blanks around what the
assistant said aside (harnesses strip them). Called by `session.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megathunder.tasks import ChatFormat, Message
from megathunder.types import Role, Segment

ASSISTANT = "assistant"
Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A conversation that a sampled turn ended: all tokens of its row, and whether the end token is among them."""

    token_ids: tuple[int, ...]  # [T]
    ended: bool


class Conversation:
    """The conversations of one session."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._known: dict[Messages, Known] = {}
        self._last: Messages = ()

    def place(self, messages: Sequence[Message]) -> Segment:
        """What must come before the next turn: an OBSERVATION after the last turn, or the PROMPT of a new row."""
        given = compared(messages)
        for end in range(len(given), 0, -1):
            if given[end - 1].role != ASSISTANT or given[:end] not in self._known:
                continue
            known = self._known[given[:end]]
            new = tuple(self._chat.continuation_ids(messages[end:], ended=known.ended))
            if given[:end] == self._last:
                return Segment(role=Role.OBSERVATION, token_ids=new)
            return Segment(role=Role.PROMPT, token_ids=known.token_ids + new)
        return Segment(role=Role.PROMPT, token_ids=tuple(self._chat.opening_ids(messages)))

    def answered(self, messages: Sequence[Message], text: str, token_ids: tuple[int, ...], *, ended: bool) -> None:
        """A turn answered `messages` with `text`; `token_ids` [T] is its row up to its end."""
        self._last = compared([*messages, Message(ASSISTANT, text)])
        self._known[self._last] = Known(token_ids=token_ids, ended=ended)


def compared(messages: Sequence[Message]) -> Messages:
    """Messages as they are told apart."""
    return tuple(m._replace(content=m.content.strip()) if m.role == ASSISTANT else m for m in messages)
