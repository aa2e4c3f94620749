#!/usr/bin/env python
"""Evaluate policies: `tools/evaluate.py --checkpoint runs/NAME --tasks shell --json OUT`; --help has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.evaluation.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
