"""One rank of a job that steps three times with weight decay, beside torch's AdamW on this rank's shards.

    RANK=... python -m tests.equality.weight_decay MODEL OUT FIELD=VALUE ...

Gradients are drawn, the same on every rank that holds the same parameter; AdamW works element by element, so that a
shard alone says whether the step was right. Writes the largest relative differences to OUT<rank>, as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner import parallel
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from megathunder.types import TakeStep

DECAY, RATE, STEPS = 0.1, 1e-2, 3


def difference(got, want):
    """The largest over parameters, relative to the parameter's norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def main():
    model, out, *fields = sys.argv[1:]
    settings = {name: value == "true" if value in ("true", "false") else int(value) for name, value in
                (field.split("=") for field in fields)}  # fmt: skip
    config = LearnerConfig(model=model, device="cpu", learning_rate=RATE, weight_decay=DECAY, clip_grad=0.0, **settings)
    layout = parallel.initialize(config)
    learner = Learner(Config(learner=config), layout, build_model(config, layout, load=False))
    data = config.distributed_optimizer and layout.data or 1
    live = learner.store.layout.parameters
    split, whole = ([p.detach().clone().requires_grad_() for p in live] for _ in range(2))
    groups = [
        {"params": [p for p in split if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in split if p.dim() == 1], "weight_decay": 0.0},
    ]
    common = {"lr": RATE, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    references = [torch.optim.AdamW(groups, **common), torch.optim.AdamW(whole, weight_decay=DECAY, **common)]
    for step in range(STEPS):
        noise = torch.Generator().manual_seed(step)
        for view, one, other in zip(learner.store.layout.home_views, split, whole, strict=True):
            drawn = torch.randn(view.shape, generator=noise)
            view.copy_(drawn / data)
            one.grad, other.grad = drawn.clone(), drawn.clone()
        assert learner.take_step(TakeStep(item=step, update=step, normaliser=1.0)).stepped
        for reference in references:
            reference.step()
    result = {
        "difference": difference([p.detach() for p in live], [p.detach() for p in split]),
        "difference_if_all_decay": difference([p.detach() for p in live], [p.detach() for p in whole]),
        "matrices": sum(p.dim() > 1 for p in live),
        "vectors": sum(p.dim() == 1 for p in live),
    }
    Path(f"{out}{layout.rank}").write_text(json.dumps(result))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
