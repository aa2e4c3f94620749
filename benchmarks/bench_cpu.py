#!/usr/bin/env python
"""Measure what the kernels of a CPU-only machine save, against the plain paths, alternating in one run.

    python benchmarks/bench_cpu.py --json out.json [--rounds 5] [--only decode|learner]

decode   seconds of a decode step of a live server of an 11M-parameter model at batch 1, 8, 32
learner  tokens per second of forward and backward of 8 rows, one thread, and how far the gradients are apart
Exit status: 0 done, 1 a target was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu.decode import measure_decode
from benchmarks.cpu.learner import measure_learner
from benchmarks.rollout.serving import machine


def main(argv: list[str]) -> int:
    """Run the measurements and write their JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path, help="where the raw numbers go")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that warms up")
    parser.add_argument("--only", choices=("decode", "learner"), help="one of the two")
    arguments = parser.parse_args(argv)
    report: dict[str, object] = {"machine": machine(), "rounds": arguments.rounds}
    met = True
    if arguments.only != "learner":
        decode = report["decode"] = asyncio.run(measure_decode(arguments.rounds))
        met &= all(row["ratio"] <= row["target"] for row in decode.values())
    if arguments.only != "decode":
        learner = report["learner"] = measure_learner(arguments.rounds)
        met &= learner["exact"] and learner["gain"] > 1.0
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
