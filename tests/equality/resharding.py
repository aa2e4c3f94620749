"""One rank of a job that goes on from a checkpoint, whatever layout wrote it.

    RANK=... python -m tests.equality.resharding MODEL CHECKPOINT OUT SAVE FIELD=VALUE ...

Loads CHECKPOINT where it exists, takes one update (the same commands in every layout) and writes the weights after it,
under Hugging Face names, to OUT. With a SAVE that is not "-", it saves there and then takes one update more.
"""

import random
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner import parallel
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from tests.equality import worlds
from tests.equality.cells import Tape


def take_update(learner, version):
    """The cell with rank 0 does the work; the others meet it at the barrier."""
    rng = random.Random(version)
    groups = worlds.random_groups(rng, values=(0.0, 1.0), sizes=[3, 4])
    tape = Tape()
    z = worlds.stream_grpo(tape, groups, rng, version=version)
    for verb, command in tape.commands if learner.layout.cell == 0 else ():
        getattr(learner, verb)(command)
    return worlds.step(learner, z, version)


def main():
    model, checkpoint, out, save, *fields = sys.argv[1:]
    settings = {name: value == "true" if value in ("true", "false") else int(value) for name, value in
                (field.split("=") for field in fields)}  # fmt: skip
    config = LearnerConfig(model=model, device="cpu", learning_rate=1e-2, **settings)
    layout = parallel.initialize(config)
    learner = Learner(Config(learner=config), layout, build_model(config, layout))
    version = 0
    if Path(checkpoint).exists():
        learner.load(Path(checkpoint))
        version = learner.stepper.updates_done
    assert take_update(learner, version).stepped
    if save != "-":
        learner.save(Path(save))
        assert take_update(learner, version + 1).stepped
    weights = {name: tensor.clone() for name, tensor in learner.export_weights()}
    if layout.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
