"""The rows of one trajectory by conversation: which are trained, which stand aside, when a turn is announced.

    the first one          its turns are announced as they are sampled
    a later one            held until the end: it may be a reset of the first (trained), or something beside it (aside)
    a turn in c            proves that every conversation opened after c stands aside: the harness went back to c

So a harness that asks for a title, or calls a sub-agent, and goes on, trains its main conversation alone; one that
shortens its history and goes on from there trains all of it. Rows and turns are numbered over what is trained.
Called by `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megathunder.types import Role, Row, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn that is fixed: its new segments (an ACTION last) and all tokens of its row up to its end, [T]."""

    segments: tuple[Segment, ...]
    token_ids: tuple[int, ...]
    at_s: float
    context_tokens: int = 0
    cached_tokens: int = 0


Announce = Callable[[int, int, SampledTurn], None]  # (turn, row, what)


@dataclass(slots=True, kw_only=True, eq=False)
class OpenRow:
    conversation: int
    turns: list[SampledTurn] = field(default_factory=list)
    announced: int = 0  # turns of it

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.turns[-1].token_ids

    @property
    def row(self) -> Row:
        return Row(segments=tuple(segment for turn in self.turns for segment in turn.segments))


class RecordedRows:
    """`announce` gets every turn of a trained row once, in order."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._trained: list[OpenRow] = []
        self._aside: list[OpenRow] = []
        self._aside_conversations: set[int] = set()
        self._announced = 0  # turns
        self._first: int | None = None  # the first conversation that is not aside

    @property
    def turns(self) -> int:
        """Turns that count, announced or held."""
        return sum(len(row.turns) for row in self._trained)

    def token_ids(self, conversation: int) -> tuple[int, ...]:
        """All tokens of the last row of a conversation; empty where it has none."""
        found = [row for row in (*self._trained, *self._aside) if row.conversation == conversation]
        return found[-1].token_ids if found else ()

    def append(self, turn: SampledTurn, conversation: int, *, aside: bool = False) -> None:
        """Record a turn: at the end of its conversation's last row, or of a new one if it begins with a PROMPT."""
        if aside or conversation in self._aside_conversations:
            self._aside_conversations.add(conversation)
            self._extend(self._aside, turn, conversation)
            return
        self._set_aside(after=conversation)
        self._extend(self._trained, turn, conversation)
        self._first = conversation if self._first is None else self._first
        if conversation == self._first:
            self._announce_held()

    def finish(self) -> None:
        """Nothing more is recorded: what is still held was trained all along."""
        self._announce_held()

    @property
    def trained(self) -> tuple[Row, ...]:
        return tuple(row.row for row in self._trained)

    @property
    def aside(self) -> tuple[Row, ...]:
        return tuple(row.row for row in self._aside)

    def _extend(self, rows: list[OpenRow], turn: SampledTurn, conversation: int) -> None:
        if turn.segments[0].role is Role.PROMPT:
            rows.append(OpenRow(conversation=conversation))
        next(row for row in reversed(rows) if row.conversation == conversation).turns.append(turn)

    def _set_aside(self, *, after: int) -> None:
        later = [row for row in self._trained if row.conversation > after]
        self._aside_conversations.update(row.conversation for row in later)
        self._aside += later
        self._trained = [row for row in self._trained if row.conversation <= after]

    def _announce_held(self) -> None:
        for number, row in enumerate(self._trained):
            for turn in row.turns[row.announced :]:
                row.announced += 1
                self._announced += 1
                self._announce(self._announced - 1, number, turn)
