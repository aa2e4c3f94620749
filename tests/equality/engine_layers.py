"""One rank that compares models of Transformer Engine's layers with transformers, the stand-in on its path.

    RANK=... PYTHONPATH=tests/equality/stand_in:. python -m tests.equality.engine_layers OUT JSON

JSON: {case: [model folder, {field: value}]}. Rank 0 writes {case: {differences, names}} to OUT, and whether a
checkpoint of the first case can be read by other layers.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.parity.parity_checks import compare
from megathunder.config.kernels import ENGINE
from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner import parallel
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from tests.equality.resharding import take_update


def exchanged(folder, settings, checkpoint):
    """Whether a checkpoint of these layers, after an update, gives Megatron-Core's own the same weights."""
    learners = []
    for layers in (ENGINE, "local"):
        config = LearnerConfig(model=folder, device="cpu", layers=layers, learning_rate=1e-2, **settings)
        layout = parallel.initialize(config)
        learners.append(Learner(Config(learner=config), layout, build_model(config, layout)))
    before, after = learners
    assert take_update(before, 0).stepped
    before.save(Path(checkpoint))
    after.load(Path(checkpoint))
    weights = [{name: tensor.clone() for name, tensor in learner.export_weights()} for learner in learners]
    same = all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert take_update(after, 1).stepped
    parallel_state.destroy_model_parallel()
    return same


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
    folder, settings = next(iter(json.loads(sys.argv[2]).values()))
    found["exchanged"] = exchanged(folder, settings, sys.argv[1] + ".checkpoint")
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main()
