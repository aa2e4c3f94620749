"""One rank that compares models in layouts with transformers, several comparisons of tools/parity.py in one world.

    RANK=... python -m tests.equality.parity OUT JSON

JSON: a list of `compared`'s arguments. Rank 0 writes the list of what it found to OUT.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tools.parity import compared


def main():
    out, jobs = sys.argv[1:]
    found = [compared(**job) for job in json.loads(jobs)]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
