"""`report.html` and `timeline.png` of a run, rebuilt from its files at any time.

    python tools/report.py runs/NAME [--perfetto trace.json]

Also run as `python -m megathunder.report.html_report` by the monitor when a run ends.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Sequence
from pathlib import Path

from megathunder.errors import UserError
from megathunder.metrics.resumptions import read_resumptions
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder, open_folder, write_atomically
from megathunder.metrics.spans import read_spans, write_chrome_trace
from megathunder.process_exit import describe_os_error
from megathunder.report.curves import draw_curves
from megathunder.report.html_page import page
from megathunder.report.panels import features
from megathunder.report.timeline import draw_timeline


def build_report(folder: RunFolder) -> Path:
    """Draw the timeline and write the page; the path of the page. Raises UserError for a run without a row."""
    config, rows = folder.read_config(), read_rows(folder.metrics)
    if not rows:
        raise UserError(f"{folder.metrics} holds no row", expected="an update", remedy="let the run take one")
    title = f"{config.run.name}: {config.objective}, {config.schedule}"
    spans = read_spans(folder.events)
    drawn = draw_timeline(spans, folder.timeline, updates=config.metrics.timeline_updates, title=title)
    picture = base64.b64encode(folder.timeline.read_bytes()).decode() if drawn else ""
    used, resumed = tuple(features(config, rows)), read_resumptions(folder.resumptions)
    drawings = {"curves": draw_curves(rows), "timeline_base64": picture}
    document = page(config, rows, **drawings, features=used, resumptions=resumed, spans=spans)
    write_atomically(folder.report, document.encode())
    return folder.report


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 0, or 2 (1: the machine refused something) with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="report.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument(
        "--perfetto", type=Path, metavar="OUT", help="also export the events to the Chrome trace format"
    )
    options = parser.parse_args(argv)
    try:
        folder = open_folder(options.run)
        print(f"report: {build_report(folder)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {describe_os_error(error, options.run, 'then build the report again')}", file=sys.stderr)
        return 1
    if options.perfetto:
        count = write_chrome_trace(read_spans(folder.events), options.perfetto)
        print(f"trace: {options.perfetto} ({count} events; open it in ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
