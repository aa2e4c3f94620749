"""One rank that compares models of Transformer Engine's layers with transformers, the stand-in on its path.

    RANK=... PYTHONPATH=tests/equality/stand_in:. python -m tests.equality.engine_layers OUT JSON

JSON: {case: [model folder, {field: value}]}, one layout for all. Rank 0 writes {case: {differences, names}} to OUT.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

from megathunder.config.kernels import ENGINE
from megathunder.config.learner import LearnerConfig
from megathunder.learner import parallel
from megathunder.learner.model import build_model
from megathunder.learner.parity import compare


def main():
    found = {}
    for case, (folder, settings) in json.loads(sys.argv[2]).items():
        config = LearnerConfig(device="cpu", layers=ENGINE, **settings)
        layout = parallel.initialize(config)
        bundle = build_model(config, layout, folder=folder)
        names = [name for name, _ in bundle.stages[0].named_parameters()]
        differences = compare(bundle)
        if differences is not None:
            found[case] = {"names": names, **dataclasses.asdict(differences)}
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
