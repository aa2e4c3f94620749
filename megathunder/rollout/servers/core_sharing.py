"""SGLang plug-in `megathunder_core_sharing`: a CPU server computes on the cores that nobody else of the run needs now.

Every step of the scheduler begins on the board (`megathunder/cores.py`) and takes its share of threads; an idle server
leaves it. A step too small to be worth a second thread stays on one. Inert where MEGATHUNDER_CORE_BOARD is not set.
Entry point of group `sglang.srt.plugins`; runs in each of a server's processes before it serves.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from megathunder.cores import VARIABLE, CoreBoard, Role, open_board

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
WORTH_THREADS = 40e6  # parameters x tokens of a step: about 0.1 GFLOP


def install() -> None:
    """Hook the scheduler's steps and its idleness."""
    if not os.environ.get(VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.run_batch", _run_batch, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.on_idle", _on_idle, HookType.AROUND)


@functools.cache
def _board() -> CoreBoard | None:
    """Opened by the process that computes, at its first step."""
    return open_board(os.environ[VARIABLE], Role.SERVER)


@functools.cache
def _parameters(scheduler: object) -> int:
    return sum(p.numel() for p in scheduler.tp_worker.model_runner.model.parameters())


def _run_batch(
    original: Callable[..., object], scheduler: object, batch: object, *rest: object, **more: object
) -> object:
    board = _board()
    if board is not None:
        share = board.begin()
        tokens = batch.extend_num_tokens if batch.forward_mode.is_extend() else len(batch.reqs)
        threads = share if _parameters(scheduler) * (tokens or 1) >= WORTH_THREADS else 1
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
    return original(scheduler, batch, *rest, **more)


def _on_idle(original: Callable[..., object], scheduler: object) -> object:
    if _board() is not None:
        _board().end()
    return original(scheduler)
