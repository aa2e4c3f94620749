"""Attention over packed rows of different lengths, with context that was computed earlier.

A micro-batch is one sequence of T tokens: R rows laid end to end. Row r attends to

    keys(r) = prefix_r (cached keys, from an earlier forward)  ++  parent_r (keys of another row of this micro-batch)
              ++  its own keys, causally

so the same code serves plain packing (no prefix, no parent), the prefix cut (a turn with its earlier turns as leaves),
the shared prompt (G responses, one cached prompt) and prompt + G responses in one micro-batch (parent).

`AttentionContext` describes one micro-batch and travels as Megatron's `packed_seq_params`, so every pipeline stage and
every recomputation sees its own. `PackedAttention` is the layer spec's `core_attention`; `PackedRotary` replaces
`GPTModel.rotary_pos_emb` and leaves the rotation to `PackedAttention`, which knows each token's position.

    spec...core_attention = PackedAttention
    model.rotary_pos_emb = PackedRotary(model.rotary_pos_emb)
    model(ids, position_ids, None, packed_seq_params=context)

Refuses attention dropout. Context parallelism is a subclass (`context.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megathunder.errors import ConfigError
from megathunder.learner.cpu_kernels import own_attention
from megathunder.learner.model import short_attention

KeyValue = tuple[Tensor, Tensor]  # k, v after rotary and q/k norm, [tokens, groups, head]

_PADDING_SLACK = 1.25  # a group of rows may compute this much more than its tokens
_SMALL_GROUP_TOKENS = 8192  # below this, one padded call beats several exact ones on an accelerator
_SMALL_GROUP_TOKENS_CPU = 256  # where a call costs little and padding is computed in full


@dataclass(slots=True, eq=False)
class Prefix:
    """Keys and values of P tokens by layer number: leaves that collect dK/dV when they require gradients."""

    layers: dict[int, KeyValue]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """`length` tokens at positions `start`..., that see `prefix[:prefix_tokens]`, then `parent`'s first
    `parent_tokens` keys, then themselves."""

    length: int
    start: int = 0
    prefix: Prefix | None = None
    prefix_tokens: int = 0
    parent: int = -1
    parent_tokens: int = 0

    @property
    def context(self) -> int:
        return self.prefix_tokens + self.parent_tokens


@dataclass(slots=True)
class _Group:
    """Rows that share one call: `queries` [R, Lq] and `keys` [R, Lk] index tokens; `mask` [R, 1, Lq, Lk] or None
    (plain causal); `valid` picks the real queries out of R * Lq, in row order (None: all of them)."""

    shape: tuple[int, int, int]
    queries: Tensor | None
    keys: Tensor | None
    mask: Tensor | None
    valid: Tensor | None


@dataclass(eq=False)
class AttentionContext(PackedSeqParams):
    """One micro-batch: its rows, positions [T], and what to capture or inject in each layer.

    `captured`, when a dict, receives (k, v) [T, groups, head] of this rank's layers, detached.
    `inject` maps a layer number to (dK, dV) [T, groups, head] that backward adds to the gradient of k and v: deferred
    context gradients. It is read when backward runs, so it may be filled after the forward.
    `predict` [N] are the positions whose next token is trained and `targets` [N] those tokens (see `logprobs.py`).
    """

    spans: tuple[RowSpan, ...] = ()
    position_ids: Tensor | None = None  # [T]
    captured: dict[int, KeyValue] | None = None
    inject: dict[int, KeyValue] | None = None
    predict: Tensor | None = None
    targets: Tensor | None = None
    cos: Tensor | None = None  # [T, 1, rotary]
    sin: Tensor | None = None
    prefixes: list[Prefix] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)
    order: Tensor | None = None

    @classmethod
    def of(cls, spans: Sequence[RowSpan], device: torch.device | str = "cpu", *, pad_to: int = 1) -> AttentionContext:
        """The context of rows laid end to end; T is padded up to a multiple of `pad_to` with a row that sees itself."""
        spans = tuple(spans)
        missing = -sum(s.length for s in spans) % pad_to
        if missing:
            spans += (RowSpan(length=missing),)
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in spans])
        context = cls(qkv_format="rows", spans=spans, position_ids=positions.to(device))
        context._plan(torch.device(device))
        return context

    @property
    def tokens(self) -> int:
        return sum(s.length for s in self.spans)

    @property
    def row_starts(self) -> list[int]:
        """First token of each row, [R]."""
        starts = [0]
        for span in self.spans[:-1]:
            starts.append(starts[-1] + span.length)
        return starts

    def _plan(self, device: torch.device) -> None:
        """Choose the calls: rows of similar size together, longest first."""
        seen: dict[int, int] = {}
        offset = 0
        for span in self.spans:
            if span.prefix is not None and id(span.prefix) not in seen:
                seen[id(span.prefix)] = offset
                self.prefixes.append(span.prefix)
                offset += span.prefix.tokens
        starts, own = self.row_starts, offset
        rows = sorted(range(len(self.spans)), key=lambda r: (-self.spans[r].length, -self.spans[r].context))
        taken: list[int] = []
        small = _SMALL_GROUP_TOKENS_CPU if device.type == "cpu" else _SMALL_GROUP_TOKENS
        for batch in _batches(rows, self.spans, small):
            self.groups.append(
                _group([self.spans[r] for r in batch], [starts[r] for r in batch], starts, seen, own, device)
            )
            taken += batch
        if taken != sorted(taken):
            flat = torch.cat([torch.arange(starts[r], starts[r] + self.spans[r].length) for r in taken])
            self.order = torch.empty_like(flat).scatter_(0, flat, torch.arange(flat.numel())).to(device)


def _batches(rows: list[int], spans: tuple[RowSpan, ...], small: int) -> list[list[int]]:
    """Split rows (longest first) where padding would cost more than another call; calls of `small` tokens never are."""
    out: list[list[int]] = []
    tallest = widest = real = 0
    for r in rows:
        area = spans[r].length * (spans[r].length + spans[r].context)
        if out:
            high, wide = max(tallest, spans[r].length), max(widest, spans[r].context)
            count = len(out[-1]) + 1
            padded = count * high * (high + wide)
            if padded <= _PADDING_SLACK * (real + area) or count * (high + wide) <= small:
                out[-1].append(r)
                tallest, widest, real = high, wide, real + area
                continue
        out.append([r])
        tallest, widest, real = spans[r].length, spans[r].context, area
    # Rows in their given order inside a call keep equal-length packs free of any gather.
    return [sorted(batch) for batch in out]


def _group(
    spans: list[RowSpan], begins: list[int], starts: list[int], seen: dict[int, int], own: int, device: torch.device
) -> _Group:
    """Index tables of one call. Context is right-aligned, so query i of every row sees keys up to `wide + i`."""
    high, wide = max(s.length for s in spans), max(s.context for s in spans)
    begin = torch.tensor(begins)
    lengths = torch.tensor([s.length for s in spans])
    steps = torch.arange(high)
    ragged = bool((lengths != high).any())
    contiguous = begins == list(range(begins[0], begins[0] + high * len(begins), high)) and not ragged
    # A padded query repeats its row's last token: finite, and its output is dropped.
    queries = begin[:, None] + torch.minimum(steps[None], lengths[:, None] - 1)
    valid = (steps[None] < lengths[:, None]).flatten().nonzero().flatten() if ragged else None
    if wide == 0:
        keys, mask = own + queries, None
    else:
        context = torch.full((len(spans), wide), own + begins[0])
        for i, span in enumerate(spans):
            pieces = []
            if span.prefix is not None:
                first = seen[id(span.prefix)]
                pieces.append(torch.arange(first, first + span.prefix_tokens))
            if span.parent >= 0:
                first = own + starts[span.parent]
                pieces.append(torch.arange(first, first + span.parent_tokens))
            if pieces:
                context[i, wide - span.context :] = torch.cat(pieces)
        keys = torch.cat([context, own + queries], 1)
        column = torch.arange(wide + high)
        visible = column[None, :] <= wide + steps[:, None]  # [Lq, Lk]
        empty = wide - torch.tensor([s.context for s in spans])
        mask = (visible[None] & (column[None, None, :] >= empty[:, None, None]))[:, None].to(device)
    plain = contiguous and wide == 0
    whole = plain and own == 0
    return _Group(
        shape=(len(spans), high, wide + high),
        queries=None
        if contiguous and begins[0] == 0 and len(spans) * high == _end(starts, spans, begins)
        else queries.flatten().to(device),
        keys=None if whole and begins[0] == 0 and len(starts) == len(spans) else keys.flatten().to(device),
        mask=mask,
        valid=None if valid is None else valid.to(device),
    )


def _end(starts: list[int], spans: list[RowSpan], begins: list[int]) -> int:
    """Tokens of the whole micro-batch when these rows are all of it, else -1."""
    return begins[-1] + spans[-1].length if len(starts) == len(spans) else -1


class PackedRotary(torch.nn.Module):
    """Stands where `GPTModel.rotary_pos_emb` stood: fills the context's cos and sin from its positions.

    Returns None to the model, so Megatron rotates nothing itself.
    """

    def __init__(self, inner: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype
        if getattr(inner, "rotary_interleaved", False):
            raise ConfigError(
                "interleaved rotary embeddings",
                expected="half-rotated ones",
                remedy="use a model family of learner/model/families",
            )
        self._table: KeyValue | None = None

    def get_rotary_seq_len(
        self,
        inference_context: object,
        transformer: object,
        transformer_input: object,
        transformer_config: object,
        packed_seq_params: AttentionContext | None = None,
    ) -> AttentionContext:
        if packed_seq_params is None:
            raise ConfigError(
                "a forward without an AttentionContext",
                expected="packed_seq_params=AttentionContext.of(...)",
                remedy="call the model through learner/passes/backward.py",
            )
        return packed_seq_params

    def forward(self, context: AttentionContext, packed_seq: bool = False, cp_group: object = None) -> None:
        highest = max(s.start + s.length for s in context.spans)
        if (
            self._table is None
            or self._table[0].shape[0] < highest
            or self._table[0].device != context.position_ids.device
        ):
            self._table = self._build(max(highest, 256), context.position_ids.device)
        cos, sin = self._table
        context.cos = cos.index_select(0, context.position_ids)[:, None, :]
        context.sin = sin.index_select(0, context.position_ids)[:, None, :]

    def _build(self, positions: int, device: torch.device) -> KeyValue:
        size = 1 << (positions - 1).bit_length()
        inverse = self.inner.inv_freq.detach().to(device=device, dtype=torch.float32)
        scale = getattr(self.inner, "seq_len_interpolation_factor", None)
        steps = torch.arange(size, device=device, dtype=torch.float32) / (scale or 1.0)
        angles = torch.outer(steps, inverse)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head] turned by its positions; only the first `cos.shape[-1]` channels turn."""
    turned = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    part = x if turned == x.shape[-1] else x[..., :turned]
    first, second = part.chunk(2, -1)
    out = part * cos + torch.cat([-second, first], -1) * sin
    return out if turned == x.shape[-1] else torch.cat([out, x[..., turned:]], -1)


class PackedAttention(torch.nn.Module):
    """Megatron's `core_attention` for packed rows.

    q [T, 1, heads, head], k and v [T, 1, groups, head] -> [T, 1, heads * head].
    """

    def __init__(
        self,
        config: object,
        layer_number: int,
        attn_mask_type: object,
        attention_type: object,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
    ) -> None:
        super().__init__()
        if attention_dropout or config.attention_dropout:
            raise ConfigError(
                "attention dropout",
                expected="0: the update must be deterministic",
                remedy="remove attention_dropout from [learner.megatron]",
            )
        self.layer_number, self.scale = layer_number, softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: AttentionContext | None = None,
    ) -> Tensor:
        context = packed_seq_params
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if context.cos is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        if context.captured is not None:
            context.captured[self.layer_number] = (k.detach(), v.detach())
        if context.inject is not None and torch.is_grad_enabled():
            _inject(context, self.layer_number, k, v)
        if context.prefixes:
            k = torch.cat([p.layers[self.layer_number][0] for p in context.prefixes] + [k])
            v = torch.cat([p.layers[self.layer_number][1] for p in context.prefixes] + [v])
        parts = [_attend(group, q, k, v, self.scale) for group in context.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if context.order is not None:
            out = out.index_select(0, context.order)
        return out.reshape(out.shape[0], 1, -1)


def _inject(context: AttentionContext, layer: int, k: Tensor, v: Tensor) -> None:
    """Add the deferred gradient of this layer when backward reaches k and v."""

    def adder(which: int) -> Callable[[Tensor], Tensor]:
        def add(gradient: Tensor) -> Tensor:
            deferred = context.inject.get(layer)
            return gradient if deferred is None else gradient + deferred[which]

        return add

    for which, tensor in enumerate((k, v)):
        if tensor.requires_grad:
            tensor.register_hook(adder(which))


def _attend(group: _Group, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """One call over R rows -> [real queries, heads, head]."""
    rows, high, wide = group.shape
    if group.queries is not None:
        q = q.index_select(0, group.queries)
    if group.keys is not None:
        k, v = k.index_select(0, group.keys), v.index_select(0, group.keys)
    heads, groups, head = q.shape[1], k.shape[1], q.shape[2]
    if own_attention() and short_attention.fits(q, k, v, group.shape):
        out = short_attention.attend_short(q, k, v, group.shape, group.mask, head**-0.5 if scale is None else scale)
        return out if group.valid is None else out.index_select(0, group.valid)
    q = q.view(rows, high, heads, head).transpose(1, 2)
    k = k.view(rows, wide, groups, head).transpose(1, 2)
    v = v.view(rows, wide, groups, head).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=group.mask, is_causal=group.mask is None, scale=scale, enable_gqa=heads != groups
    )
    out = out.transpose(1, 2).reshape(rows * high, heads, head)
    return out if group.valid is None else out.index_select(0, group.valid)
