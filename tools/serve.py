#!/usr/bin/env python
"""Serve a policy on this machine for a run elsewhere: `tools/serve.py --config C.toml --announce DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.cli.serve import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
