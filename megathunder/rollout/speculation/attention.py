"""Attention of drafted rows on a CPU server: the rows of one request at once, under a mask.

    plain torch backend     every row gathers its request's keys and values and attends alone
    here                    one gather and one attention a request: row j of n sees all but the last n - 1 - j positions

The slots and masks of a step are the same in every layer, so they are made once (`Chains`). Steps without drafts use
SGLang's own loop, which is also the oracle in tests. Installed by `plugin.py` around `_run_sdpa_forward_decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention


class Chain(NamedTuple):
    """One request's rows: `rows` of the batch, `slots` [L] of its cache, `mask` [n, L] (None for one row)."""

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor | None


class Chains:
    """The chains of the step that runs; None between steps with drafts."""

    current: tuple[Chain, ...] | None = None


def chains_of(lengths: list[int], widths: list[int], pool_rows: list[int], table: torch.Tensor) -> tuple[Chain, ...]:
    """`lengths[i]` tokens of request i's longest row, `widths[i]` its rows, `table[pool_rows[i]]` its cache slots."""
    chains, first = [], 0
    for length, width, pool_row in zip(lengths, widths, pool_rows):
        mask = None
        if width > 1:
            mask = torch.arange(length)[None, :] <= torch.arange(length - width, length)[:, None]
        chains.append(Chain(slice(first, first + width), table[pool_row, :length].long(), mask))
        first += width
    return tuple(chains)


@contextmanager
def drafted_step(chains: tuple[Chain, ...]) -> Iterator[None]:
    """Decode steps in this context have `chains`."""
    Chains.current = chains
    try:
        yield
    finally:
        Chains.current = None


def decode(
    original: Callable[..., torch.Tensor],
    backend: object,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *arguments: object,
    **options: object,
) -> torch.Tensor:
    """`query` [R, H, D], `keys` and `values` [slots, H_kv, D] -> `output` [R, H, D], filled in."""
    window = options.get("sliding_window_size")
    if Chains.current is None or options.get("is_cross_attn") or (window is not None and window > -1):
        return original(backend, query, output, keys, values, *arguments, **options)
    for chain in Chains.current:
        output[chain.rows] = scaled_dot_product_attention(
            query[chain.rows].transpose(0, 1)[None],
            keys[chain.slots].transpose(0, 1)[None].to(query.dtype),
            values[chain.slots].transpose(0, 1)[None].to(query.dtype),
            attn_mask=chain.mask,
            scale=options.get("scaling"),
            enable_gqa=options.get("enable_gqa", False),
        )[0].transpose(0, 1)
    return output
