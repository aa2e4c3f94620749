"""The one object through which a run is watched: it passes rows, events and progress on to whatever records them.

    monitor = open_monitor(config, folder, decode)        events.jsonl is installed as this process's recorder
    monitor.print(plan_table(...)); monitor.record(event); monitor.refresh(progress); monitor.row(row); monitor.close()

Owned by the coordinator. Nothing here changes what is learned; a failing sink beside `metrics.jsonl` never ends a run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from megathunder import tracing
from megathunder.config import Config
from megathunder.metrics.console import Console, Progress
from megathunder.metrics.resource_monitor import MemoryWatch
from megathunder.metrics.row import MetricsRow
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.sinks import Sink, open_sinks
from megathunder.metrics.trajectories import Decode, TrajectoryWriter
from megathunder.types import Event

REPORT_S = 180.0
REPORT_BYTES = 2**20  # of a page and its picture


class Monitor:
    """Fans out to console, sinks, events and trajectories; watches memory."""

    def __init__(
        self, config: Config, folder: RunFolder, console: Console, sinks: list[Sink], writer: TrajectoryWriter | None
    ) -> None:
        self.folder = folder
        self._console, self._sinks, self._writer = console, sinks, writer
        self._at_end, self._report_every = config.metrics.report, config.metrics.report_every
        self._recorder = tracing.Recorder(folder.events) if config.metrics.events else None
        self._report: subprocess.Popen[bytes] | None = None
        self._worker, self._pending = ThreadPoolExecutor(1, "monitor"), list[Future[object]]()
        self._memory = MemoryWatch()
        self._memory.start()
        if self._recorder:
            tracing.install(self._recorder)
            tracing.mark(tracing.RUN_LANE, "start", schedule=config.schedule, objective=config.objective)

    def print(self, renderable: object) -> None:
        self._console.print(renderable)

    def refresh(self, progress: Progress) -> None:
        self._memory.enter(progress.phase)
        self._console.refresh(progress)

    def record(self, event: Event) -> None:
        """A rollout event, for the trajectory files."""
        if self._writer:
            self._writer.note(event)

    def row(self, row: MetricsRow) -> None:
        """The update has ended: record its row and its trajectories. What takes long is left to a thread; where that
        failed (a full disk), the next row or `close` raises its error."""
        self._raise_failed()
        row = self._memory.add_memory(row)
        for sink in self._sinks:
            sink.row(row)
        if self._writer:
            self._later(self._writer.end_update(row.update))
        self._console.row(row)
        if self._report_every and (row.update + 1) % self._report_every == 0:
            self._later(functools.partial(self._rebuild_report, wait=False))

    def skip_report(self) -> None:
        """The process must end soon: build no report (`tools/report.py` does)."""
        self._at_end = False

    def close(self) -> None:
        """End every sink, then build the report from what they wrote."""
        self._memory.close()
        notes = [sink.close() for sink in self._sinks]
        self._console.close()
        for note in filter(None, notes):
            self._console.print(note)
        self._worker.shutdown()
        if self._recorder:
            tracing.install(None)
            self._recorder.close()
        self._raise_failed()
        if self._at_end and self.folder.metrics.stat().st_size:
            if shutil.disk_usage(self.folder.path).free < REPORT_BYTES:
                self._console.print(f"no room for a report; free space, then: tools/report.py {self.folder.path}")
            else:
                self._rebuild_report(wait=True)

    def _later(self, work: Callable[[], object]) -> None:
        self._pending.append(self._worker.submit(work))

    def _raise_failed(self) -> None:
        """Raise what work that has ended in the thread raised."""
        ended = [work for work in self._pending if work.done()]
        self._pending = [work for work in self._pending if work not in ended]
        for work in ended:
            work.result()

    def _rebuild_report(self, *, wait: bool) -> None:
        """In a process of its own, and politely: drawing takes seconds that belong to the run."""
        if self._report and self._report.poll() is None:
            self._report.wait()
        command = [sys.executable, "-m", "megathunder.report.html_report", str(self.folder.path)]
        self._report = subprocess.Popen(command)
        os.setpriority(os.PRIO_PROCESS, self._report.pid, 10)
        if wait and not self._report_built():
            self._console.print(f"the report was not built; see above, then: tools/report.py {self.folder.path}")

    def _report_built(self) -> bool:
        try:
            return self._report.wait(REPORT_S) == 0
        except subprocess.TimeoutExpired:
            self._report.kill()
            return False


def open_monitor(config: Config, folder: RunFolder, decode: Decode) -> Monitor:
    """The monitor of `config`'s run; `decode` turns token ids into text for the trajectory files."""
    return Monitor(
        config,
        folder,
        Console(live=config.run.progress),
        open_sinks(config, folder),
        TrajectoryWriter(folder, decode) if config.metrics.trajectories else None,
    )
