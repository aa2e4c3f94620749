"""The limit of the machine: what two sets of cores lose when both work at once.

    independence   speed of a set of cores while the other works too, by its speed alone; the mean of both
    limit          2 x independence: no overlap of rollout and learner can win more, whatever the schedule

Cores of a virtual machine may be two threads of one real core, and change that from minute to minute. The work is that
of small models on a CPU: Python between matrix products over some megabytes of weights. Called by tools/compare.py.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WORK = """
import os, sys, time
import numpy
os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
weights = [numpy.ones((128, 384), numpy.float32) for _ in range(32)]
rows = numpy.ones((32, 128), numpy.float32)
print(flush=True)
sys.stdin.readline()
done, end = 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    for weight in weights:
        rows @ weight
        done += sum(range(100)) > 0
print(done)
"""


def independence(first: Sequence[int], second: Sequence[int], seconds: float = 1.0) -> float:
    """1.0: the two sets of cores do not slow each other down. Works on each alone, then on both, for `seconds`."""
    sets = (first, second)
    alone = [_work([cores], seconds)[0] for cores in sets]
    both = _work(sets, seconds)
    return statistics.fmean(b / a for a, b in zip(alone, both, strict=True))


def processor() -> str:
    """What /proc/cpuinfo calls the processor, with family and model."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    known = dict(tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
    if "model name" not in known:
        return platform.processor()
    return f"{known['model name']}, family {known.get('cpu family', '?')}, model {known.get('model', '?')}"


def _work(sets: Sequence[Sequence[int]], seconds: float) -> list[int]:
    """Rounds of work that each set of cores does in `seconds`, all at once."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    processes = []
    for cores in sets:
        line = [sys.executable, "-c", WORK, ",".join(map(str, cores)), str(seconds)]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=environment))
    for process in processes:
        process.stdout.readline()  # it is ready
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [int(process.communicate()[0]) for process in processes]
