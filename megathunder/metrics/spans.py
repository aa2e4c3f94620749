"""Spans read back from `events.jsonl`, and their export to the Chrome trace format (chrome://tracing, Perfetto).

A run that was resumed has several starts in one file, each with a clock of its own; `read_spans` returns the spans
since the last mark `start` in the lane `run`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from megathunder.jsonl import garbled, json_lines
from megathunder.tracing import LEARNER_LANES, ROLLOUT_LANES, RUN_LANE, UPDATE_LANE

PROCESSES = ((UPDATE_LANE, "updates"), (ROLLOUT_LANES, "rollout"), (LEARNER_LANES, "learner"), ("", "run"))


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """An interval in a lane; an instant where both times are equal."""

    lane: str
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, object] = {}

    @property
    def update(self) -> int | None:
        """The update the span says it belongs to."""
        value = self.attributes.get("update")
        return value if isinstance(value, int) else None

    @property
    def tokens(self) -> int:
        """Tokens that a cell's work computed."""
        value = self.attributes.get("tokens")
        return value if isinstance(value, int) else 0


def read_spans(path: Path) -> list[Span]:
    """Spans since the run was last started, by start time; a last line cut off by a crash is left out."""
    spans: list[Span] = []
    for number, (line, table) in enumerate(json_lines(path), start=1):
        try:
            known = {key: table.pop(key) for key in ("lane", "name", "start_s", "end_s")}
        except KeyError as missing:
            raise garbled(path, number, line, f"no {missing}") from None
        span = Span(**known, attributes=table)
        if span.lane == RUN_LANE and span.name == "start":
            spans.clear()
        spans.append(span)
    return sorted(spans, key=lambda span: span.start_s)


def chrome_trace(spans: Iterable[Span]) -> Iterator[dict[str, object]]:
    """Trace events: a process for updates, rollout, learner and the rest; a thread for each lane; microseconds."""
    threads: dict[str, tuple[int, int]] = {}
    for span in spans:
        if span.lane not in threads:
            process = next(i for i, (prefix, _) in enumerate(PROCESSES) if span.lane.startswith(prefix))
            threads[span.lane] = (process, len(threads))
            name = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": PROCESSES[process][1]}}
            yield name
            yield {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": len(threads) - 1,
                "args": {"name": span.lane},
            }
        process, thread = threads[span.lane]
        event: dict[str, object] = {
            "name": span.name,
            "cat": PROCESSES[process][1],
            "pid": process,
            "tid": thread,
            "ts": span.start_s * 1e6,
            "args": span.attributes,
        }
        instant = span.end_s == span.start_s
        yield event | ({"ph": "i", "s": "t"} if instant else {"ph": "X", "dur": (span.end_s - span.start_s) * 1e6})


def write_chrome_trace(spans: Iterable[Span], path: Path) -> int:
    """Write the trace to `path`; the number of its events."""
    events = list(chrome_trace(spans))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)
