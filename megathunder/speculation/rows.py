"""A decode batch in which a request may take several rows, and what of it is kept.

    request i, context of L_i tokens in the cache + its newest token, draft d_1..d_k
    row j = 0..k    input d_j (row 0: the newest token)    length L_i + 1 + j    cache slot of position L_i + j
    kept            sampled[0..n] for the first n with sampled[n] != d_(n+1)      n + 1 tokens, n of them drafted

Every row's keys and values are written before any row attends, so row j sees those of rows before it: a decode step of
SGLang, unchanged. Slots past the kept tokens are written again by the next step. Used by `worker.py`, `prompts.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")


def lay_out(batch: ScheduleBatch, drafts: Sequence[Sequence[int]]) -> None:
    """Turn `batch` (one row a request, lengths without the newest token) into rows, in place."""
    newest = [request.output_ids[-1] for request in batch.reqs]
    device, lengths = batch.seq_lens.device, batch.seq_lens
    inputs = [token for first, draft in zip(newest, drafts) for token in (first, *draft)]
    batch.input_ids = torch.tensor(inputs, dtype=torch.int64).to(device, non_blocking=True)
    if len(inputs) == len(newest):
        batch.seq_lens = lengths + 1
        batch.seq_lens_cpu = batch.seq_lens if device.type == "cpu" else batch.seq_lens_cpu + 1
        positions = lengths
    else:
        owner = [i for i, draft in enumerate(drafts) for _ in range(1 + len(draft))]
        step = torch.tensor([j for draft in drafts for j in range(1 + len(draft))])
        rows = torch.tensor(owner)
        repeat(batch, owner, rows.to(device))
        batch.seq_lens_cpu = batch.seq_lens_cpu[rows] + step.to(batch.seq_lens_cpu.dtype) + 1
        positions = lengths[rows.to(device)] + step.to(device)
        batch.seq_lens = positions + 1
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)
    batch.seq_lens_sum = None
    batch.out_cache_loc = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, positions].to(torch.int64)


def repeat(batch: ScheduleBatch, owner: list[int], rows: torch.Tensor) -> None:
    """Give every row what its request has; `owner[r]` is the request of row r, `rows` the same on the device."""
    batch.reqs = [batch.reqs[i] for i in owner]
    batch.req_pool_indices = batch.req_pool_indices[rows]
    batch.sampling_info = _repeated(batch.sampling_info, rows)
    for name in ("top_logprobs_nums", "token_ids_logprobs", "multimodal_inputs"):
        values = getattr(batch, name)
        if values is not None:
            setattr(batch, name, [values[i] for i in owner])


def _repeated(info: SamplingBatchInfo, rows: torch.Tensor) -> SamplingBatchInfo:
    values = {name: getattr(info, name) for name in PER_REQUEST}
    return dataclasses.replace(info, **{n: None if value is None else value[rows] for n, value in values.items()})


def kept_counts(sampled: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens kept of each request, at least 1; `sampled` is one token a row, [R]."""
    counts, first = [], 0
    for draft in drafts:
        agreed = 0
        while agreed < len(draft) and sampled[first + agreed] == draft[agreed]:
            agreed += 1
        counts.append(agreed + 1)
        first += 1 + len(draft)
    return counts


def padded_rows(counts: Sequence[int], drafts: Sequence[Sequence[int]]) -> list[int]:
    """Row of kept token j of request i at [i * max(counts) + j]; where j is not kept, the request's first row."""
    stride, places, first = max(counts), [], 0
    for count, draft in zip(counts, drafts):
        places += [first + j if j < count else first for j in range(stride)]
        first += 1 + len(draft)
    return places
