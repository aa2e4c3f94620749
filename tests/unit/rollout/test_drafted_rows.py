"""Rows of a drafted step: what is kept of them, and that one masked attention equals row after row."""

from __future__ import annotations

import random

import pytest
import torch

from megathunder.speculation.attention import blocks_of, drafted_step
from megathunder.speculation.rows import kept_counts, padded_rows


def test_a_draft_is_kept_while_it_equals_what_was_sampled_before_it():
    drafts = [(5, 6, 7), (), (8, 9)]
    sampled = [5, 6, 1, 2, 3, 4, 9, 9]  # rows of request 0: four; of request 1: one; of request 2: three
    assert kept_counts(sampled, drafts) == [3, 1, 1]
    assert padded_rows([3, 1, 1], drafts) == [0, 1, 2, 4, 4, 4, 5, 5, 5]


def test_kept_tokens_are_those_that_one_token_a_step_would_have_sampled():
    """A policy that maps a context to a token, drafts that are right by chance: any drafts, the same continuation."""
    rng = random.Random(0)

    def policy(context: tuple[int, ...]) -> int:
        return hash(context) % 3

    for _ in range(200):
        start, plain = tuple(rng.randrange(3) for _ in range(4)), []
        while len(plain) < 12:
            plain.append(policy((*start, *plain)))
        said: list[int] = []
        while len(said) < 12:
            draft = tuple(rng.randrange(3) for _ in range(rng.randrange(4)))
            sampled = [policy((*start, *said, *draft[:j])) for j in range(len(draft) + 1)]
            said += sampled[: kept_counts(sampled, [draft])[0]]
        assert said[:12] == plain


class Backend:
    """A backend whose loops are known by what they answer."""

    def _run_sdpa_forward_decode(self, *arguments, **options):
        return "decode loop"

    def _run_sdpa_forward_extend(self, *arguments, **options):
        return "extend loop"


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", [[9, 5, 12], [9, 5, 60]], ids=["padded", "one by one"])
def test_one_masked_attention_equals_attention_row_after_row(heads, lengths):
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    widths, pool_rows = [3, 5, 1], [2, 0, 1]
    table = torch.stack([torch.randperm(64) for _ in range(3)]).int()
    keys, values = torch.randn(64, kv_heads, 8), torch.randn(64, kv_heads, 8)
    query = torch.randn(sum(widths), query_heads, 8)
    expected, seen = [], set()
    for length, width, pool_row in zip(lengths, widths, pool_rows):
        for row in range(width):
            slots = table[pool_row, : length - width + 1 + row].long()
            seen |= set(slots.tolist())
            k, v = (x[slots].repeat_interleave(query_heads // kv_heads, dim=1) for x in (keys, values))
            q = query[len(expected)]
            weights = torch.softmax(torch.einsum("hd,lhd->hl", q, k) * 0.3, dim=-1)
            expected.append(torch.einsum("hl,lhd->hd", weights, v))
    unwritten = [slot for slot in range(64) if slot not in seen]
    keys[unwritten] = values[unwritten] = torch.nan
    backend = Backend()
    blocks = blocks_of(lengths, widths, torch.tensor(pool_rows), table, query.dtype)
    assert len(blocks) == (1 if max(lengths) == 12 else 3)
    with drafted_step(backend, blocks):
        for loop in (backend._run_sdpa_forward_decode, backend._run_sdpa_forward_extend):
            told = loop(query, torch.empty_like(query), keys, values, scaling=0.3, enable_gqa=True)
            torch.testing.assert_close(told, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_steps_without_drafts_and_windows_use_the_servers_own_loops():
    backend, query = Backend(), torch.zeros(1, 1, 8)
    with drafted_step(backend, ()):
        assert backend._run_sdpa_forward_decode(query, query, query, query, sliding_window_size=4) == "decode loop"
    assert backend._run_sdpa_forward_decode(query, query, query, query) == "decode loop"
    assert not vars(backend)
