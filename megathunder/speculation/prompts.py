"""Drafts beside a prompt: the step that reads prompts verifies what may follow them.

    request i, prompt of L_i tokens (the first P_i in the prefix cache), draft d_1..d_k
    sequence 0        prompt tokens P_i..L_i - 1                            samples token L_i
    sequence j        d_j alone, after L_i + j - 1 cached tokens            samples token L_i + j
    kept              as of any drafted step (`rows.py`)

To SGLang these are 1 + k prompts of which it samples one token each. The first token kept takes SGLang's way for
prompts; the others follow as if a decode step had kept them (`hand_over`). Used by `worker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megathunder.speculation.rows import repeat

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult


class Rest(NamedTuple):
    """What was kept beyond the first token of each prompt: `tokens[i, 1 : counts[i]]` of request i."""

    counts: list[int]
    tokens: torch.Tensor  # [requests, stride]
    logprobs: torch.Tensor | None  # the same shape


def can_draft(batch: ScheduleBatch) -> bool:
    """Whether every prompt of `batch` ends in this step, and nothing is asked about prompts but what follows."""
    whole = (len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)
    return not (
        batch.is_prefill_only
        or batch.decoding_reqs
        or batch.input_embeds is not None
        or batch.replace_embeds is not None
        or any(length != end for length, end in zip(batch.seq_lens_cpu.tolist(), whole))
        or (batch.return_logprob and _asks_of_prompts(batch))
    )


def _asks_of_prompts(batch: ScheduleBatch) -> bool:
    starts = zip(batch.extend_lens, batch.extend_logprob_start_lens)
    asked = any(batch.top_logprobs_nums) or any(ids is not None for ids in batch.token_ids_logprobs)
    return asked or any(start < length for length, start in starts)


def lay_out_prompts(batch: ScheduleBatch, drafts: Sequence[Sequence[int]], slots: torch.Tensor) -> None:
    """Turn `batch` (one sequence a request) into sequences, in place; `slots` [drafted tokens] of the cache are new."""
    widths = [len(draft) for draft in drafts]
    ends, table = batch.seq_lens_cpu.tolist(), batch.req_to_token_pool.req_to_token
    inputs, places, own = [], [], slots.split(widths)
    prompts = zip(batch.input_ids.split(batch.extend_lens), batch.out_cache_loc.split(batch.extend_lens))
    for (tokens, known), request, draft, new, end in zip(prompts, batch.reqs, drafts, own, ends):
        if draft:
            table[request.kv.req_pool_idx, end : end + len(draft)] = new.to(table.dtype)
            request.kv.kv_allocated_len += len(draft)
        inputs += [tokens, torch.tensor(draft, dtype=tokens.dtype, device=tokens.device)]
        places += [known, new.to(known.dtype)]
    batch.input_ids, batch.out_cache_loc = torch.cat(inputs), torch.cat(places)
    _lengthen(batch, widths, ends)
    owner = [i for i, width in enumerate(widths) for _ in range(1 + width)]
    repeat(batch, owner, torch.tensor(owner, device=batch.req_pool_indices.device))


def _lengthen(batch: ScheduleBatch, widths: Sequence[int], ends: Sequence[int]) -> None:
    """Lengths of sequences for lengths of requests."""
    of_drafts = [[end + j for j in range(width)] for end, width in zip(ends, widths)]
    batch.prefix_lens = [n for prefix, more in zip(batch.prefix_lens, of_drafts) for n in (prefix, *more)]
    batch.extend_lens = [n for length, more in zip(batch.extend_lens, of_drafts) for n in (length, *[1] * len(more))]
    batch.extend_num_tokens = sum(batch.extend_lens)
    batch.extend_logprob_start_lens = list(batch.extend_lens)
    lengths = [prefix + length for prefix, length in zip(batch.prefix_lens, batch.extend_lens)]
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=batch.seq_lens_cpu.dtype)
    batch.seq_lens = batch.seq_lens_cpu.to(batch.seq_lens.device)
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)
    batch.seq_lens_sum = None


def set_aside_the_rest(result: GenerationBatchResult, counts: list[int], return_logprob: bool) -> None:
    """Leave each request's first token in `result`, which has all that were kept; the others become `result.rest`."""
    tokens = result.next_token_ids.view(len(counts), -1)
    result.next_token_ids, logprobs = tokens[:, 0], None
    if return_logprob:
        logprobs = result.logits_output.next_token_logprobs
        result.logits_output.next_token_logprobs = logprobs[:, 0]
    result.rest = Rest(counts, tokens, logprobs)


def hand_over(
    original: Callable[..., None], processor: object, batch: ScheduleBatch, result: GenerationBatchResult
) -> None:
    """Around SGLang's handling of a step that read prompts: its first tokens, then the rest of those that go on."""
    original(processor, batch, result)
    rest: Rest | None = getattr(result, "rest", None)
    if rest is None:
        return
    on = [i for i, r in enumerate(batch.reqs) if rest.counts[i] > 1 and not (r.finished() or r.is_retracted)]
    if on:
        processor.process_batch_result_decode(_decoding(batch, on), _kept(rest, on))


def _decoding(batch: ScheduleBatch, on: list[int]) -> ScheduleBatch:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    part = batch.copy()
    part.reqs = [batch.reqs[i] for i in on]
    part.forward_mode = ForwardMode.DECODE
    return part


def _kept(rest: Rest, on: list[int]) -> GenerationBatchResult:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    counts = [rest.counts[i] - 1 for i in on]
    logprobs = None if rest.logprobs is None else rest.logprobs[on, 1:]
    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None, next_token_logprobs=logprobs),
        next_token_ids=rest.tokens[on, 1:].flatten(),
        accept_lens=torch.tensor(counts, dtype=torch.int32),
        speculative_num_draft_tokens=rest.tokens.shape[1] - 1,
        speculative_output_stride=rest.tokens.shape[1] - 1,
        num_non_draft_tokens_per_req=0,
    )
