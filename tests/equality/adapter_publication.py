"""One rank of a job that exports a model with random adapters: merged, and in the two parts that servers merge.

    RANK=... python -m tests.equality.adapter_publication MODEL OUT FIELD=VALUE ...

The leader checks that base and adapters merge to the bits of the merged export, in float32 and bfloat16, and writes the
former to OUT.
"""

import dataclasses
import sys

import torch
from safetensors.torch import save_file

from benchmarks.parity.parity_checks import fill_adapters
from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.low_rank import merge
from megathunder.learner.parallel import initialize, shutdown
from megathunder.publish.transports.adapter import paired


def export(config, layout):
    """The merged weights, once base and adapters are seen to merge to them."""
    bundle = build_model(config, layout)
    fill_adapters(bundle)
    learner = Learner(Config(learner=config), layout, bundle)
    merged = {name: tensor.clone() for name, tensor in learner.export_weights()}
    base = {name: tensor.clone() for name, tensor in learner.export_base()}
    factors = paired(learner.export_adapter())
    if layout.rank == 0:
        assert len(factors) == sum(w.dim() == 2 and "_proj" in name for name, w in base.items()), len(factors)
        for name, whole in merged.items():
            ours = merge(base[name], *reversed(factors[name]), config.lora_alpha / config.lora_rank) \
                if name in factors else base[name]  # fmt: skip
            assert torch.equal(ours, whole), name
            assert (name in factors) == (not torch.equal(base[name], whole)), name
    return merged


def main():
    model, out, *fields = sys.argv[1:]
    settings = {name: int(value) for name, value in (field.split("=") for field in fields)}
    config = LearnerConfig(model=model, device="cpu", lora_rank=4, lora_alpha=6.0, **settings)
    layout = initialize(config)
    merged = export(config, layout)
    if layout.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in merged.items()}, out)
    export(dataclasses.replace(config, dtype="bfloat16"), layout)
    shutdown()


if __name__ == "__main__":
    main()
