"""Where rows go: `metrics.jsonl` (the truth), and what `metrics.sinks` names beside it.

    class MySink:                                       metrics.sinks = ["wandb", "my_sinks.py:MySink"]
        def __init__(self, config: Config, folder: RunFolder) -> None: ...
        def row(self, row: MetricsRow) -> None: ...     every row once, in order
        def close(self) -> str | None: ...              once; what it returns is printed

A sink beside `metrics.jsonl` lives in a thread of its own. Whatever it raises costs its own rows and nothing else: one
warning at the first error, and the number of lost rows at the end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megathunder.config import Config
from megathunder.metrics.row import MetricsRow, encode_row
from megathunder.metrics.run_folder import RunFolder
from megathunder.registry import SINKS

log = logging.getLogger(__name__)
CLOSE_S = 60.0


class Sink(Protocol):
    """Takes every row once."""

    def row(self, row: MetricsRow) -> None: ...
    def close(self) -> str | None: ...


class JsonlSink:
    """Appends one line per row and hands it to the operating system at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def row(self, row: MetricsRow) -> None:
        self._file.write(encode_row(row))

    def close(self) -> None:
        self._file.close()


class GuardedSink:
    """A sink that can neither fail nor delay the run. `make` builds it; it is called in the sink's own thread."""

    def __init__(self, name: str, make: Callable[[], Sink], *, close_s: float = CLOSE_S) -> None:
        self.name, self.lost_rows, self.errors = name, 0, 0
        self._make, self._close_s = make, close_s
        self._rows: queue.SimpleQueue[MetricsRow | None] = queue.SimpleQueue()
        self._handed, self._kept, self._closing_note = 0, 0, ""
        self._first_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def row(self, row: MetricsRow) -> None:
        self._handed += 1
        self._rows.put(row)

    def close(self) -> str:
        """Wait until the sink has ended, `close_s` at most. What there is to say: lost rows, where its files are."""
        self._rows.put(None)
        self._thread.join(self._close_s)
        hangs = f"; it has not ended after {self._close_s:.0f} s" if self._thread.is_alive() else ""
        self.lost_rows = self._handed - self._kept
        if not (self.lost_rows or hangs or self._first_error):
            return self._closing_note
        first = f"; first error: {_describe(self._first_error)}" if self._first_error else ""
        lost = f"{self.lost_rows} of {self._handed} rows were lost{hangs}{first}"
        return f"sink {self.name}: {lost}. metrics.jsonl has every row. {self._closing_note}".rstrip()

    def _run(self) -> None:
        sink = self._guard(self._make)
        while (row := self._rows.get()) is not None:
            if sink is not None and self._guard(lambda: (sink.row(row), True)):
                self._kept += 1
        if sink is not None:
            self._closing_note = self._guard(sink.close) or ""

    def _guard(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except BaseException as error:  # a library or the user's code, SystemExit included: it ends nothing here
            self.errors += 1
            if self._first_error is None:
                self._first_error = error
                log.warning("sink %s failed and the run goes on: %s", self.name, _describe(error))
            return None


def open_sinks(config: Config, folder: RunFolder) -> list[Sink]:
    """The sinks of a run, `metrics.jsonl` first; that the others can be made has been checked."""
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    for name in config.metrics.sinks:
        sinks.append(GuardedSink(name, lambda name=name: SINKS.get(name)(config, folder)))
    return sinks


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
