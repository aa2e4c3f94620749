"""The SUFFIX worker: one decode step of SGLang's own model worker, over drafts, and what of it is kept.

    propose -> lay out rows -> forward and sample every row -> keep the agreeing prefix -> tokens, log-probabilities

Where attention is ours (plain torch on a CPU), a step that reads prompts is drafted too (`prompts.py`). A step without
drafts is SGLang's own. Requests whose next token depends on those before it by more than the model (penalties,
grammars, logit processors), or that want hidden states, keep their whole batch from drafting.
Weight updates, flushes and versions pass the cache of trajectories by. Built by SGLang's scheduler (`plugin.py`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from megathunder.speculation.attention import blocks_of, drafted_step, replaces
from megathunder.speculation.drafter import Drafter
from megathunder.speculation.drafts import NOTHING, Draft
from megathunder.speculation.gate import Gate
from megathunder.speculation.prompts import can_draft, lay_out_prompts, set_aside_the_rest
from megathunder.speculation.rows import kept_counts, lay_out, padded_rows
from megathunder.speculation.settings import build_cache, read_settings

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

LOGPROB_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)


class SuffixWorker(BaseSpecWorker):
    """Stands between the scheduler and the model worker `target_worker`."""

    draft_worker = None  # there is no draft model

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, ps: ParallelState, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self.model_runner = target_worker.model_runner
        if self.model_runner.is_hybrid_swa or mambaish_config(self.model_runner.model_config) is not None:
            raise ValueError("suffix speculation needs full attention in every layer; set rollout.speculation = 'off'")
        self._on_cpu = self.model_runner.device == "cpu"
        self.settings = read_settings()
        self._clock = time.thread_time if self._on_cpu else time.perf_counter
        self.gate = Gate(self.settings, self._clock)

    def alloc_memory_pool(self, **pools: object) -> None:
        """Called when the pools exist: only now is it known how many rows a step may have."""
        self.req_to_token_pool, self.token_to_kv_pool_allocator = self.target_worker.get_memory_pool()
        self.drafter = Drafter(
            build_cache(self.settings),
            self.gate,
            max_draft=self.settings.max_draft_tokens,
            max_rows=self.model_runner.max_running_requests,
            context_tokens=self.model_runner.model_config.context_len,
            clock=self._clock,
        )

    def init_attention_backends(self) -> None:
        """Called when the model's are made."""
        self._attention_is_ours = self._on_cpu and replaces(self.model_runner.attn_backend)

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: object = None, pp_proxy_tensors: object = None
    ) -> GenerationBatchResult:
        if not batch.forward_mode.is_decode():
            result, counts = self._read(batch), [1] * len(batch.reqs)
        else:
            result, counts = self._decode(batch)
        if self._on_cpu:
            result.copy_to_cpu = _nothing_to_copy
        result.accept_lens = torch.tensor(counts, dtype=torch.int32)
        result.speculative_num_draft_tokens = result.speculative_output_stride = max(counts, default=1)
        return result

    def _read(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Read prompts; `new_seq_lens` then counts what was kept of the drafts after them."""
        lengths, pool_rows, read = batch.seq_lens, batch.req_pool_indices, batch.extend_lens
        drafts = self.drafter.propose_after_prompts(batch.reqs) if self._asks_after(batch) else None
        self.gate.interrupted()
        tokens = [draft.tokens for draft in drafts or ()]
        slots = self._slots(batch, sum(map(len, tokens)))
        if slots is not None:
            lay_out_prompts(batch, tokens, slots)
            longest = [length + len(draft) for length, draft in zip(lengths.tolist(), tokens)]
            with self._attention(longest, [n + len(draft) for n, draft in zip(read, tokens)], pool_rows):
                result = self.target_worker.forward_batch_generation(batch)
            counts = self._keep(result, drafts, batch.return_logprob)
            set_aside_the_rest(result, counts, batch.return_logprob)
            result.new_seq_lens = lengths + torch.tensor(counts, dtype=lengths.dtype) - 1
        else:
            result = self.target_worker.forward_batch_generation(batch)
            result.new_seq_lens, counts, drafts = lengths, [1] * len(tokens), drafts and [NOTHING] * len(tokens)
        if drafts is not None:
            self.gate.prompts_read(drafts, counts)
        return result

    def _asks_after(self, batch: ScheduleBatch) -> bool:
        asks = self._attention_is_ours and self.gate.asks_after_prompts(len(batch.reqs))
        return asks and batch.forward_mode.is_extend() and _may_draft(batch) and can_draft(batch)

    def _decode(self, batch: ScheduleBatch) -> tuple[GenerationBatchResult, list[int]]:
        lengths, pool_rows, size = batch.seq_lens, batch.req_pool_indices, len(batch.reqs)
        drafts = self.drafter.propose(batch.reqs) if _may_draft(batch) else [NOTHING] * size
        self.gate.begin(size, drafts)
        tokens = [draft.tokens for draft in drafts]
        lay_out(batch, tokens)
        if any(tokens):
            widths = [1 + len(draft) for draft in tokens]
            longest = [length + width for length, width in zip(lengths.tolist(), widths)]
            with self._attention(longest, widths, pool_rows):
                result = self.target_worker.forward_batch_generation(batch)
            counts = self._keep(result, drafts, batch.return_logprob)
            result.new_seq_lens = lengths + torch.tensor(counts, dtype=lengths.dtype).to(lengths.device)
        else:
            result = self.target_worker.forward_batch_generation(batch)
            counts, result.new_seq_lens = [1] * size, batch.seq_lens
            if batch.return_logprob:
                result.logits_output.next_token_logprobs = result.logits_output.next_token_logprobs[:, None]
        self.gate.end(counts)
        return result, counts

    def _slots(self, batch: ScheduleBatch, count: int) -> torch.Tensor | None:
        """New slots of the cache, prefixes that nobody uses making way; None for none, or where there are too few."""
        if count:
            evict_from_tree_cache(batch.tree_cache, count)
        return self.token_to_kv_pool_allocator.alloc(count) if count else None

    def _attention(
        self, longest: list[int], widths: list[int], pool_rows: torch.Tensor
    ) -> contextlib.AbstractContextManager[None]:
        if not self._attention_is_ours:
            return contextlib.nullcontext()
        table = self.req_to_token_pool.req_to_token
        return drafted_step(
            self.model_runner.attn_backend, blocks_of(longest, widths, pool_rows, table, self.model_runner.dtype)
        )

    def _keep(self, result: GenerationBatchResult, drafts: list[Draft], return_logprob: bool) -> list[int]:
        """Cut `result`, one entry a row, down to what is kept, padded to the longest: [requests * stride]."""
        tokens = [draft.tokens for draft in drafts]
        counts = kept_counts(result.next_token_ids.tolist(), tokens)
        places = padded_rows(counts, tokens)
        rows = torch.tensor(places).to(result.next_token_ids.device)
        result.next_token_ids = result.next_token_ids[rows]
        if return_logprob:
            output = result.logits_output
            output.next_token_logprobs = output.next_token_logprobs[rows].view(len(drafts), -1)
            for name in LOGPROB_LISTS:
                values = getattr(output, name)
                if values:
                    setattr(output, name, [values[place] for place in places])
        return counts

    def control(self, values: dict[str, float]) -> bool:
        """Settings changed from outside, as the gate says; `forget` drops the trajectories seen so far."""
        done = self.gate.control(values)
        if done and values.get("forget"):
            self.drafter.forget(build_cache(self.settings))
        return done

    def report(self) -> dict[str, float]:
        """What GET /server_info shows as `speculation`."""
        return self.gate.report() | {"cached_tokens": self.drafter.cached_tokens}

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.drafter.finished(rid)

    def clear_cache_pool(self) -> None:
        """The prefix cache is flushed: keys and values are of old weights. Tokens seen are not."""

    def update_weights_from_disk(self, request: object) -> tuple[bool, str]:
        return True, "no draft weights"

    update_weights_from_ipc = update_weights_from_disk

    def update_weights_from_tensor(self, request: object) -> tuple[bool, str]:
        return self.target_worker.update_weights_from_tensor(request)


def _nothing_to_copy(**options: object) -> None:
    """Results are on the CPU; SGLang's copy would be 1 % of a plain step of a small model."""


def _may_draft(batch: ScheduleBatch) -> bool:
    info = batch.sampling_info
    changed = (info.acc_additive_penalties, info.acc_scaling_penalties, info.sampling_mask_batch_indices)
    return not (
        any(value is not None for value in changed)
        or info.has_custom_logit_processor
        or batch.has_grammar
        or batch.return_hidden_states
        or (batch.multimodal_inputs is not None and any(batch.multimodal_inputs))
    )
