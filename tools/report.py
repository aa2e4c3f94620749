"""Rebuild a run's report: `python tools/report.py runs/NAME [--perfetto trace.json]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megathunder.report.html_report import main

if __name__ == "__main__":
    sys.exit(main())
