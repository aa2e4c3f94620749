"""A chain of turns that extend each other token for token, as it grows; the source of every `TrainRow`.

    prompt | action 0 | observation | action 1 | ...         turn t ends where action t ends

A chain is one row of a trajectory: a context reset starts another chain. Only action tokens are trained; what follows
the last action is never forwarded. Called by the scheduler as events arrive, and by `train_rows` for whole
trajectories. Refuses scores that do not have one number per action token.
"""

from __future__ import annotations

from collections.abc import Iterable

from megathunder.errors import UserError
from megathunder.types import ContributionId, Role, Row, Segment, TrainRow, Trajectory


class TokenChain:
    """Tokens of one row, turn by turn. `ends[t]` is the position after turn t; `scored` counts leading scored turns."""

    __slots__ = (
        "_pending_scores",
        "ends",
        "logprobs",
        "mask",
        "prompt_tokens",
        "scored",
        "starts",
        "teacher",
        "tokens",
    )

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.mask: list[int] = []
        self.logprobs: list[float] = []
        self.teacher: list[float] = []
        self.ends: list[int] = []
        self.starts: list[int] = []  # first position of each turn's action
        self.prompt_tokens = 0
        self.scored = 0
        self._pending_scores: dict[int, tuple[float, ...]] = {}

    @classmethod
    def of_row(cls, row: Row) -> TokenChain:
        """The chain of a finished row, one turn per action."""
        chain = cls()
        pending: list[Segment] = []
        for segment in row.segments:
            pending.append(segment)
            if segment.role is Role.ACTION:
                chain.append_turn(pending)
                pending = []
        return chain

    @property
    def turns(self) -> int:
        return len(self.ends)

    def append_turn(self, segments: Iterable[Segment]) -> None:
        """Add the segments of one turn; the last of them is its action."""
        action: Segment | None = None
        for segment in segments:
            action = segment if segment.role is Role.ACTION else None
            if segment.role is Role.PROMPT:
                self.prompt_tokens += len(segment.token_ids)
            self._append(segment)
        if action is None:
            raise UserError(
                f"turn {self.turns} without an action at its end",
                expected="segments that end in the sampled action",
                remedy="emit a turn when its action is complete; observations belong to the next turn",
            )
        self.ends.append(len(self.tokens))
        self.starts.append(len(self.tokens) - len(action.token_ids))

    def score_turn(self, turn: int, teacher_logprobs: tuple[float, ...]) -> None:
        """Set the teacher's log-probabilities of turn `turn` (index in this chain); scores may arrive in any order."""
        length = self.ends[turn] - self.starts[turn]
        if len(teacher_logprobs) != length:
            raise UserError(
                f"{len(teacher_logprobs)} teacher log-probabilities for an action of {length} tokens",
                expected="one number per action token",
                remedy="score exactly the sampled token ids",
            )
        self._pending_scores[turn] = teacher_logprobs
        while self.scored in self._pending_scores:
            start, end = self.starts[self.scored], self.ends[self.scored]
            self.teacher += [0.0] * (start - len(self.teacher))
            self.teacher[start:end] = self._pending_scores.pop(self.scored)
            self.scored += 1

    def truncate(self, turns: int) -> None:
        """Forget every turn from `turns` on (a lost trajectory keeps its scored turns)."""
        length = self.ends[turns - 1] if turns else 0
        for values in (self.tokens, self.mask, self.logprobs, self.teacher):
            del values[length:]
        del self.ends[turns:], self.starts[turns:]
        self._pending_scores.clear()

    def trained_tokens(self, first: int = 0, end: int | None = None) -> int:
        """Sampled tokens of turns [first, end)."""
        return sum(e - s for s, e in zip(self.starts[first:end], self.ends[first:end], strict=True))

    def train_row(
        self,
        source: ContributionId,
        *,
        row: int,
        context_turns: int,
        end_turn: int,
        mask_from_turn: int,
        scale: float,
        unit: float = 1.0,
        group_size: int = 0,
    ) -> TrainRow:
        """Tokens up to turn `end_turn` (exclusive), of which the turns before `context_turns` are already forwarded and
        those before `mask_from_turn` are not trained by this row. `cuts` are the starts of every later turn. Teacher
        log-probabilities are there once all these turns are scored; a forward pass that runs ahead of them has none."""
        length = self.ends[end_turn - 1] if end_turn else 0
        mask_start = self.ends[mask_from_turn - 1] if mask_from_turn else 0
        return TrainRow(
            source=source,
            token_ids=tuple(self.tokens[:length]),
            loss_mask=(0,) * mask_start + tuple(self.mask[mask_start:length]),
            engine_logprobs=tuple(self.logprobs[:length]),
            teacher_logprobs=tuple(self.teacher[:length]) if len(self.teacher) >= length else (),
            scale=scale,
            unit=unit,
            row=row,
            prompt_tokens=self.prompt_tokens,
            group_size=group_size,
            context_tokens=self.ends[context_turns - 1] if context_turns else 0,
            cuts=tuple(self.ends[: max(end_turn - 1, 0)]),
        )

    def _append(self, segment: Segment) -> None:
        sampled = segment.role is Role.ACTION
        count = len(segment.token_ids)
        self.tokens.extend(segment.token_ids)
        self.mask.extend((int(sampled),) * count)
        self.logprobs.extend(segment.logprobs or (0.0,) * count)


def train_rows(trajectory: Trajectory, scale: float, unit: float = 1.0) -> tuple[TrainRow, ...]:
    """The rows of a whole trajectory, each with the same `scale` and `unit`: several rows share the one reward."""
    source = ContributionId(*trajectory.id)
    chains = [TokenChain.of_row(row) for row in trajectory.rows]
    return tuple(
        c.train_row(source, row=i, context_turns=0, end_turn=c.turns, mask_from_turn=0, scale=scale, unit=unit)
        for i, c in enumerate(chains)
        if c.turns
    )
