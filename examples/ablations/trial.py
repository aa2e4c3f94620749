#!/usr/bin/env python
"""One point of a sweep: `trial.py --config C.toml --schedule=sync --run.group_size=4` trains as `runs/.../sync_4`.

A trial is named after what it varies, so that trials do not write into each other's folders. Run by `wandb agent` and
by `grid.py`; everything else is tools/train.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[2] / "tools" / "train.py"


def name_of(arguments: list[str]) -> str:
    """The values of the `--setting=value` arguments, joined."""
    return "_".join(a.partition("=")[2] for a in arguments if a.startswith("--") and "=" in a) or "trial"


if __name__ == "__main__":
    given = sys.argv[1:]
    os.execv(sys.executable, [sys.executable, str(TRAIN), *given, "--run.name", name_of(given)])
