"""TrainRows end to end in one sequence: token ids, rows, and the trained tokens as flat arrays.

    row r computes its tokens [first, end); the token at position t is predicted by the hidden state at t - 1

`end` is one before the last trained token's position: nothing after it can reach the loss. A row whose keys are needed
later (`keep_all`) computes every token. A row that starts in the middle (`first` > 0) needs the keys of what precedes
it (`context`). If token `first` itself is trained, its predecessor is computed again here, for its hidden state.
Called by `backward.py` and `prefix.py`. Refuses rows whose arrays disagree in length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megathunder.errors import UserError
from megathunder.learner.model.attention import AttentionContext, RowSpan
from megathunder.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Tokens [first, end) of `row`, placed by `span`; `trained` off: the row only supplies or receives context.
    `counted` off: a stand-in that adds nothing, run because other ranks wait for its collectives."""

    row: TrainRow
    first: int
    end: int
    span: RowSpan
    trained: bool = True
    counted: bool = True

    @property
    def length(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R rows, T tokens (padding included), N trained tokens."""

    pieces: tuple[PackedRow, ...]
    token_ids: Tensor  # [1, T]
    context: AttentionContext
    row_of: Tensor  # [N] which piece
    scales: Tensor  # [R]
    units: Tensor  # [R] the scale without the advantage: weight of the KL term
    engine: Tensor  # [N] the engine's log-probabilities
    teacher: Tensor | None  # [N]
    old: Tensor | None = None  # [N] of the policy that sampled, where the learner computed them itself
    reference: Tensor | None = None  # [N] of the reference policy, where there is a KL term

    @property
    def tokens(self) -> int:
        """Computed tokens, padding and stand-ins excluded."""
        return sum(p.length for p in self.pieces if p.counted)

    @property
    def trained_tokens(self) -> int:
        return self.row_of.numel()


def check_row(row: TrainRow) -> None:
    """Raise UserError when the arrays of a row disagree."""
    length = len(row.token_ids)
    lengths = (length, len(row.loss_mask), len(row.engine_logprobs), len(row.teacher_logprobs) or length)
    if len(set(lengths)) != 1 or row.context_tokens > length:
        raise UserError(
            f"{row.source}: token_ids, loss_mask, engine_logprobs, teacher_logprobs of {lengths} tokens with "
            f"{row.context_tokens} of context",
            expected="one entry per token in each, and no more context than tokens",
            remedy="build rows with objectives.chain",
        )


def first_computed(row: TrainRow) -> int:
    """Where a row that has `context_tokens` of cached context starts computing."""
    first = row.context_tokens
    trained_at_once = 0 < first < len(row.token_ids) and row.loss_mask[first]
    return first - 1 if trained_at_once else first


def last_computed(row: TrainRow, *, keep_all: bool) -> int:
    """Exclusive end of what a row computes; `first_computed(row)` when nothing of it is trained."""
    if keep_all:
        return len(row.token_ids)
    first = first_computed(row)
    for t in range(len(row.token_ids) - 1, first, -1):
        if row.loss_mask[t]:
            return t
    return first


def whole_rows(rows: Sequence[TrainRow], *, weightless: bool = False) -> list[PackedRow]:
    """Rows from their first token, no context; rows that cannot add to a gradient are left out (those of scale 0 not
    if `weightless`)."""
    pieces = []
    for row in rows:
        check_row(row)
        end = last_computed(row, keep_all=False) if row.scale or weightless else 0
        if end > 0:
            pieces.append(PackedRow(row=row, first=0, end=end, span=RowSpan(length=end)))
    return pieces


def pack(pieces: Sequence[PackedRow], device: torch.device, *, dtype: torch.dtype, pad_to: int = 1) -> MicroBatch:
    """Lay `pieces` end to end. `dtype` is that of the loss arithmetic; T is padded to a multiple of `pad_to`."""
    context = AttentionContext.of([p.span for p in pieces], device, pad_to=pad_to)
    ids = np.zeros(context.tokens, dtype=np.int64)
    predict, targets, row_of, engine, teacher = [], [], [], [], []
    start = 0
    for index, piece in enumerate(pieces):
        row, first, end = piece.row, piece.first, piece.end
        tokens = np.asarray(row.token_ids, dtype=np.int64)
        ids[start : start + end - first] = tokens[first:end]
        if piece.trained:
            mask = np.asarray(row.loss_mask[first + 1 : end + 1], dtype=bool)
            at = mask.nonzero()[0]
            predict.append(start + at)
            at = at + first + 1
            targets.append(tokens[at])
            row_of.append(np.full(at.size, index))
            engine.append(np.asarray(row.engine_logprobs, dtype=np.float64)[at])
            if row.teacher_logprobs:
                teacher.append(np.asarray(row.teacher_logprobs, dtype=np.float64)[at])
        start += end - first
    context.predict = _tensor(predict, np.int64, torch.int64, device)
    context.targets = _tensor(targets, np.int64, torch.int64, device)
    trained = [p.row for p in pieces if p.trained]
    scored = [bool(r.teacher_logprobs) for r in trained]
    if any(scored) and not all(scored):
        raise UserError(
            f"{sum(scored)} of {len(scored)} rows carry teacher log-probabilities",
            expected="all rows of a micro-batch, or none",
            remedy="pack rows of one objective together",
        )
    return MicroBatch(
        pieces=tuple(pieces),
        token_ids=torch.from_numpy(ids).to(device)[None],
        context=context,
        row_of=_tensor(row_of, np.int64, torch.int64, device),
        scales=torch.tensor([p.row.scale for p in pieces], dtype=dtype, device=device),
        units=torch.tensor([p.row.unit for p in pieces], dtype=dtype, device=device),
        engine=_tensor(engine, np.float64, dtype, device),
        teacher=_tensor(teacher, np.float64, dtype, device) if any(scored) else None,
    )


def _tensor(parts: list[np.ndarray], kind: type, dtype: torch.dtype, device: torch.device) -> Tensor:
    flat = np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)
    return torch.from_numpy(flat).to(device=device, dtype=dtype)
