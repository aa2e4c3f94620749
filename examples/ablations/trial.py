#!/usr/bin/env python
"""One point of a sweep: `trial.py --config C.toml --schedule=sync --run.group_size=4` trains as
`runs/.../schedule-sync_group_size-4`.

A trial is named after the parameters it varies and their values, below the name of its sweep (that of the file, or the
id that W&B gives it), so that neither trials nor sweeps write into each other's folders. Run by `wandb agent` and by
`grid.py`; everything else is tools/train.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SWEEP = "MEGATHUNDER_SWEEP"
TRAIN = Path(__file__).resolve().parents[2] / "tools" / "train.py"


def name_of(arguments: list[str]) -> str:
    """`parameter-value` of the `--setting=value` arguments, joined, behind the name of the sweep."""
    varied = (a.removeprefix("--").partition("=") for a in arguments if a.startswith("--") and "=" in a)
    parts = [f"{name.rpartition('.')[2]}-{value.replace('/', '-')}" for name, _, value in varied]
    sweep = os.environ.get(SWEEP) or os.environ.get("WANDB_SWEEP_ID")
    return "_".join([*([sweep] if sweep else []), *parts]) or "trial"


if __name__ == "__main__":
    given = sys.argv[1:]
    os.execv(sys.executable, [sys.executable, str(TRAIN), *given, "--run.name", name_of(given)])
