"""How the coordinator process is told to end, and with which status it does.

    SIGTERM                        save a checkpoint, then end                             0
    (within run.stop_timeout_s, or else end at once)                                       1
    SIGTERM, no update begun       end at once, and say that nothing was trained           0
    SIGINT                         end at once: the last checkpoint and a report stay      130
    rank 0 died                    end at once (the kernel sends SIGTERM)                  1

To end at once is to cancel the work, once: what it started is taken down on the way out, and no second signal
interrupts that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

from megathunder.checkpoint.resume import resume_hint
from megathunder.metrics.run_folder import RunFolder
from megathunder.process_exit import INTERRUPTED, NOTHING_TRAINED, print_error, report_to_torchrun


class ShutdownHandler:
    """Watches the signals of this process while `work` runs; `run.stop` is set once there is a run to stop."""

    def __init__(self, work: asyncio.Task[None], parent: int, limit_s: float, folder: RunFolder) -> None:
        self.stop: Callable[[], None] | None = None
        self.updates_done: Callable[[], int] = lambda: 0
        self._work, self._parent, self._limit_s, self._folder = work, parent, limit_s, folder
        self._asked = False
        self._status: int | None = None
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        loop.add_signal_handler(signal.SIGINT, self._on_sigint)

    def status(self) -> int:
        """The exit status of cancelled work."""
        return INTERRUPTED if self._status is None else self._status

    @property
    def succeeded(self) -> bool:
        """Whether work was cancelled and nothing failed."""
        return self._status == 0

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the work: there is time for a report, unlike after a signal of a batch system."""
        return self._status == INTERRUPTED

    def _on_sigint(self) -> None:
        if self._status is None:
            line = f"interrupted after {self.updates_done()} updates; {resume_hint(self._folder.checkpoints)}"
            print(line, file=sys.stderr, flush=True)
            report_to_torchrun(line)
        self._cancel(INTERRUPTED, "")

    def _on_sigterm(self) -> None:
        if os.getppid() != self._parent:
            died = "the learner's rank 0 has died (killed, out of memory?); the run ends"
            self._cancel(1, f"{died}; {resume_hint(self._folder.checkpoints)}")
        elif self.stop is None:
            if self._status is None:
                print(f"{NOTHING_TRAINED}; run folder: {self._folder.path}", file=sys.stderr, flush=True)
            self._cancel(0, "")
        elif not self._asked:
            self._asked = True
            self.stop()
            late = f"the run could not be saved within {self._limit_s:.0f} s of SIGTERM (run.stop_timeout_s)"
            asyncio.get_running_loop().call_later(self._limit_s, self._cancel, 1, f"{late}; an older checkpoint stays")

    def _cancel(self, status: int, reason: str) -> None:
        if self._status is None:
            self._status = status
            if reason:
                print_error(reason)  # now: what follows may be cut short
            self._work.cancel()
