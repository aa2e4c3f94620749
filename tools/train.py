#!/usr/bin/env python
"""Train a policy: `torchrun --nproc-per-node N tools/train.py --config C.toml [--section.key VALUE ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.process_exit import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # importing the rest takes a second or two

from megathunder.cli.train import main, plan, run

__all__ = ["main", "plan"]

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
