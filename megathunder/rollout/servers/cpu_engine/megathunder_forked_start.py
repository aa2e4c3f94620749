"""SGLang plug-in: a CPU server's scheduler and detokenizer are forked from its main process, not started anew.

SGLang starts them with `spawn`, for CUDA's sake, and each imports everything again, 8 s of CPU time apiece.
Without CUDA a fork, before any thread is started, gives the same processes at once.
"""

from __future__ import annotations

import multiprocessing


def install() -> None:
    """Entry point of group `sglang.srt.plugins`; matters in the main process only."""
    from sglang.srt.entrypoints import engine

    original = engine._set_envs_and_config

    def set_envs_and_config(server_args: object) -> None:
        original(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_envs_and_config
