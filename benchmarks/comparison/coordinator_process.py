"""The coordinator of a measurement: `python benchmarks/comparison/coordinator_process.py CONFIG CELLS HOST FD`, started
by rank 0 of `benchmarks/alternating.py`. The alternation lies beside CONFIG."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.comparison.alternation import alternation_of
from benchmarks.comparison.assembly import assembly_of
from megathunder.coordinator.process import main

if __name__ == "__main__":
    file, cells, host, descriptor = sys.argv[1:]
    sys.exit(main(file, cells, host, descriptor, assemble=assembly_of(alternation_of(Path(file).parent))))
