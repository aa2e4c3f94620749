#!/usr/bin/env python
"""Our trainer on a workload, a step at a time: `own_side.py --alternation FILE --config FILE`.

Started by `trl_grpo.py`. All is as in a training run, but that no checkpoint is saved and that an update's rollouts
begin when the file `gate` in the run folder lets them (`own_coordinator.py`).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.alternating import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], coordinator=(str(Path(__file__).resolve().with_name("own_coordinator.py")),)))
