"""Spans and marks: who did what, when. Rooms call `span`/`mark`; a run installs one recorder (default: none).

Events are appended as JSON lines to `events.jsonl` and drawn by `report/timeline.py`. A lane is a row of that picture:

    rollout/<n>     one trajectory in flight; names: trajectory, turn, tool, verifier, score
    learner/<cell>  one learner cell; names: differentiate, fold, step, publish, save
    update          the phases of update `update=k`: rollout (first request to last reward), tail (to last backward),
                    suffix (to the last server's acknowledgement)
    run             marks: start, evaluate, restart ...; save, while the learner waits for it
    checkpoint      write: a save in the background, until it is complete
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

UPDATE_LANE = "update"
RUN_LANE = "run"
CHECKPOINT_LANE = "checkpoint"
ROLLOUT_LANES = "rollout/"
LEARNER_LANES = "learner/"


def rollout_lane(trajectory: int) -> str:
    """The lane of the trajectory's number within its update (group * group size + index)."""
    return f"{ROLLOUT_LANES}{trajectory}"


def learner_lane(cell: int) -> str:
    return f"{LEARNER_LANES}{cell}"


class Recorder:
    """Appends a JSON object per line: {"lane", "name", "start_s", "end_s", ...attributes}, `time.monotonic` seconds.

    Lines are encoded and written by a thread, so that a span costs its caller a microsecond. A file that cannot be
    written (a full disk) raises its OSError at the next span, or at the end."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("ab", buffering=0)
        self._events: SimpleQueue[dict[str, object] | None] = SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def write(self, lane: str, name: str, start_s: float, end_s: float, **attributes: object) -> None:
        self._check()
        self._events.put({"lane": lane, "name": name, "start_s": start_s, "end_s": end_s, **attributes})

    def close(self) -> None:
        """Write what is left and close the file."""
        self._events.put(None)
        self._thread.join()
        self._file.close()
        self._check()

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if self._error is None:
                try:
                    self._file.write(json.dumps(event).encode() + b"\n")
                except OSError as error:
                    error.filename = error.filename or str(self._path)
                    self._error = error

    def _check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


_recorder: Recorder | None = None


def install(recorder: Recorder | None) -> None:
    """Make `recorder` receive every span of this process; None turns tracing off."""
    global _recorder
    _recorder = recorder


def record(lane: str, name: str, start_s: float, end_s: float, **attributes: object) -> None:
    """Record an interval measured elsewhere (a learner's reply, a server's answer)."""
    if _recorder is not None:
        _recorder.write(lane, name, start_s, end_s, **attributes)


def mark(lane: str, name: str, **attributes: object) -> None:
    """Record an instant."""
    now = time.monotonic()
    record(lane, name, now, now, **attributes)


@contextlib.contextmanager
def span(lane: str, name: str, **attributes: object) -> Iterator[None]:
    """Record the time the body takes."""
    start_s = time.monotonic()
    try:
        yield
    finally:
        record(lane, name, start_s, time.monotonic(), **attributes)
