"""SGLang plug-in `megathunder_core_sharing`: a CPU server says when it computes, and the learner leaves it its core.

Every step of the scheduler begins on the board (`megathunder/cores.py`); an idle server leaves it. The server itself
stays on one thread: a decode step is hundreds of short parallel regions, and a thread that waits at the end of one for
a core that agents and sandboxes also use loses more than it brings. Inert where MEGATHUNDER_CORE_BOARD is not set.
Entry point of group `sglang.srt.plugins`; runs in each of a server's processes before it serves.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from megathunder.cores import VARIABLE, CoreBoard, Role, open_board

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


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


def _run_batch(original: Callable[..., object], scheduler: object, *rest: object, **more: object) -> object:
    if _board() is not None:
        _board().begin()
    return original(scheduler, *rest, **more)


def _on_idle(original: Callable[..., object], scheduler: object) -> object:
    if _board() is not None:
        _board().end()
    return original(scheduler)
