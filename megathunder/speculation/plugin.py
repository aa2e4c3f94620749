"""SGLang plug-in `megathunder_suffix_speculation`: registers SUFFIX, and hooks what a plug-in is not asked about.

    --speculative-algorithm SUFFIX --speculative-num-draft-tokens N     N = 1 + max_draft_tokens
    POST /set_internal_state {"server_args": {"speculation_max_draft_tokens": 0 to N - 1, "speculation_gate": 0 or 1,
                                             "speculation_forget": 1}}  trajectories seen so far
    GET  /server_info -> internal_states[0].speculation                 what the gate decided (`report.py`)

Entry point of group `sglang.srt.plugins`; runs in each of a server's processes before it serves. Inert unless the
server was started with the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable

from megathunder.speculation.algorithm import NAME, SuffixAlgorithm, refuse_what_is_not_supported
from megathunder.speculation.prompts import hand_over

SRT = "sglang.srt"
PREFIX = "speculation_"
RESULTS = "scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"


def install() -> None:
    """Register the algorithm and the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=refuse_what_is_not_supported, spec_class=SuffixAlgorithm
    )
    def build(server_args: ServerArgs) -> type:
        from megathunder.speculation.worker import SuffixWorker

        return SuffixWorker

    hooks = {
        f"{SRT}.managers.scheduler.Scheduler.set_internal_state": _set_state,
        f"{SRT}.managers.scheduler.Scheduler.get_internal_state": _get_state,
        f"{SRT}.managers.{RESULTS}.process_batch_result_prefill": hand_over,
        f"{SRT}.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": _no_cache_copies,
        f"{SRT}.mem_cache.allocation_sizing.get_alloc_reserve_per_decode": _reserve_one_step,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _reserve_one_step(original: Callable[[], int]) -> int:
    """Cache slots a request holds ahead. SGLang's two steps are for overlapped scheduling, and may outgrow the slot
    table near the model's context limit."""
    from sglang.srt.runtime_context import get_spec

    reserve = original()
    return reserve // 2 if get_spec().speculative_algorithm == NAME else reserve


def _no_cache_copies(original: Callable[[object], None], pool: object) -> None:
    """Rows are kept where they are written, so the cache is never moved; its kernel is not in every CPU build."""
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm == NAME:
        pool._kv_copy_config = None
    else:
        original(pool)


def _set_state(original: Callable[..., object], scheduler: object, request: object) -> object:
    """Take our keys; any other is SGLang's."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    ours = {k.removeprefix(PREFIX): v for k, v in request.server_args.items() if k.startswith(PREFIX)}
    if not ours:
        return original(scheduler, request)
    worker = scheduler.draft_worker
    done = hasattr(worker, "gate") and len(ours) == len(request.server_args) and worker.control(ours)
    return SetInternalStateReqOutput(updated=bool(done))


def _get_state(original: Callable[..., object], scheduler: object, request: object) -> object:
    answer = original(scheduler, request)
    if hasattr(scheduler.draft_worker, "gate"):
        answer.internal_state["speculation"] = scheduler.draft_worker.report()
    return answer
