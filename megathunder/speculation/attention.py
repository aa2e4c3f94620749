"""Attention of drafted rows on a CPU server: the rows of all requests at once, padded, under a mask.

    plain torch backend     every row gathers its request's keys and values and attends alone
    here                    one gather and one attention a step: row j of a request's n sees all but its last n - 1 - j
                            positions; one a request where padding would be more than PADDED times the work

Slots and masks are the same in every layer, so they are made once a step (`Block`). They stand in for SGLang's own
loops, which are also the oracle in tests, for the length of one drafted step: other steps run as without us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

LOOPS = ("_run_sdpa_forward_decode", "_run_sdpa_forward_extend")
PADDED = 4.0


class Block(NamedTuple):
    """b requests that attend together, n rows and L positions each with padding.

    `rows` [r] of the batch are theirs; padded row i is row `source[i]` [b n]; row i of theirs is padded row `back[i]`.
    """

    rows: torch.Tensor
    source: torch.Tensor
    back: torch.Tensor
    slots: torch.Tensor  # [b L], of the cache
    mask: torch.Tensor  # [b, 1, n, L], added


def blocks_of(
    lengths: Sequence[int], widths: Sequence[int], pool_rows: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> tuple[Block, ...]:
    """`lengths[i]` tokens of request i's longest row, `widths[i]` its rows, `table[pool_rows[i]]` its cache slots."""
    length, width = torch.tensor(lengths), torch.tensor(widths)
    first = width.cumsum(0) - width
    work = sum(a * b for a, b in zip(lengths, widths))
    if len(lengths) * max(lengths) * max(widths) <= PADDED * work:
        return (_block(length, width, first, table[pool_rows, : max(lengths)].long(), dtype),)
    return tuple(
        _block(length[i, None], width[i, None], first[i, None], table[pool_rows[i], None, : lengths[i]].long(), dtype)
        for i in range(len(lengths))
    )


def _block(
    length: torch.Tensor, width: torch.Tensor, first: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype
) -> Block:
    ranks, positions = torch.arange(int(width.max())), torch.arange(slots.shape[1])
    rank = torch.minimum(ranks, width[:, None] - 1)  # padding repeats the last row
    source = first[:, None] + rank
    real = ranks < width[:, None]
    unseen = positions > (length - width)[:, None, None] + rank[:, :, None]
    mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)
    slots = torch.where(positions < length[:, None], slots, slots[:, :1])  # what nobody wrote may be no number
    back = real.flatten().nonzero()[:, 0]
    return Block(source.flatten()[back], source.flatten(), back, slots.flatten(), mask[:, None])


def replaces(backend: object) -> bool:
    """Whether `backend` attends in the loops that `drafted_step` replaces."""
    return all(hasattr(backend, name) for name in LOOPS)


@contextmanager
def drafted_step(backend: object, blocks: tuple[Block, ...]) -> Iterator[None]:
    """Steps of `backend` in this context have `blocks`."""
    for name in LOOPS:
        setattr(backend, name, partial(attend, getattr(backend, name), blocks))
    try:
        yield
    finally:
        for name in LOOPS:
            delattr(backend, name)


def attend(
    original: Callable[..., torch.Tensor],
    blocks: tuple[Block, ...],
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *arguments: object,
    **options: object,
) -> torch.Tensor:
    """`query` [R, H, D], `keys` and `values` [slots, H_kv, D] -> `output` [R, H, D], filled in."""
    window = options.get("sliding_window_size")
    if options.get("is_cross_attn") or (window is not None and window > -1):
        return original(query, output, keys, values, *arguments, **options)
    for rows, source, back, slots, mask in blocks:
        requests = mask.shape[0]

        def padded(flat: torch.Tensor, index: torch.Tensor, requests: int = requests) -> torch.Tensor:
            return flat.index_select(0, index).unflatten(0, (requests, -1)).transpose(1, 2)

        attended = scaled_dot_product_attention(
            padded(query, source),
            padded(keys, slots).to(query.dtype),
            padded(values, slots).to(query.dtype),
            attn_mask=mask,
            scale=options.get("scaling"),
            enable_gqa=options.get("enable_gqa", False),
        )
        output.index_copy_(0, rows, attended.transpose(1, 2).flatten(0, 1).index_select(0, back))
    return output
