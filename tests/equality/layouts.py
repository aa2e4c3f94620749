"""One rank of a job that takes the same update in several parallel layouts and release modes.

    torchrun --nproc-per-node N -m tests.equality.layouts FOLDER OUT LAYOUT [LAYOUT ...]

A layout is `name:field=value,field=value` of [learner] (`tp1:` for none). Rank 0 writes into OUT, one file
<layout>.<mode>.safetensors each: the reduced gradient under Hugging Face names and, as `stat.*`, what the cell's leader
reported.
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.learner import parallel
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.weights import export_tensors
from tests.equality import turns, worlds
from tests.equality.cells import Tape

MODES = {
    "trajectory": ({}, {}),
    "turn": ({}, {"release": "turn"}),
    "turn_forward": ({}, {"release": "turn_forward"}),
    "grpo_forward": ({}, {"release": "turn_forward"}),
    "prompt": ({"shared_prompt": "group"}, {}),
    "exact": ({"accumulator": "exact"}, {}),
}
DISTILLED = ("turn", "turn_forward")


def commands_of(mode):
    """The same commands on every rank of the job, and the normaliser."""
    rng = random.Random(5)
    tape = Tape()
    if mode in DISTILLED:
        trajectories = [worlds.random_trajectory(rng, i, 0, turns=4) for i in range(3)]
        scores = worlds.random_scores(rng, trajectories)
        z = turns.release_opd(tape, trajectories, scores, rng, mode=mode)
    else:
        groups = [
            [worlds.random_trajectory(rng, b, i, reward=float(i % 2), split=i == 2) for i in range(4)] for b in range(2)
        ]
        z = turns.release_grpo(tape, groups, rng) if mode == "grpo_forward" else None
        z = z or worlds.stream_grpo(tape, groups, rng, reward_values=9)
    return tape.commands, z


def take_update(learner, mode):
    """(gradient by Hugging Face name on the cell's leader, loss, trained tokens, largest gap)."""
    commands, z = commands_of(mode)
    done = [getattr(learner, verb)(command) for verb, command in commands]
    seen = {}
    step = learner.stepper.step

    def spy(normaliser, *, skip):
        views = dict(zip(learner.store.layout.parameters, learner.store.layout.home_views, strict=True))
        for name, tensor in export_tensors(learner.bundle, lambda p: views[p] / normaliser):
            seen[name] = tensor.clone()
        return step(normaliser, skip=skip)

    learner.stepper.step = spy
    stats = worlds.step(learner, z)
    seen["stat.loss"] = torch.tensor(sum(s.loss_sum for s in done), dtype=torch.float64)
    seen["stat.trained"] = torch.tensor(float(sum(s.trained_tokens for s in done)), dtype=torch.float64)
    seen["stat.gap"] = torch.tensor(max(s.logprob_diff_max for s in done), dtype=torch.float64)
    seen["stat.norm"] = torch.tensor(stats.grad_norm, dtype=torch.float64)
    return seen


def run_layout(folder, out, name, settings, modes):
    learner_settings = LearnerConfig(model=str(folder), device="cpu", **settings)
    layout = parallel.initialize(learner_settings)
    for mode in modes:
        more, streaming = MODES[mode]
        config = Config(
            objective="opd" if mode in DISTILLED else "grpo",
            learner=LearnerConfig(model=str(folder), device="cpu", **settings, **more),
            streaming=StreamingConfig(**streaming, pack_tokens=60),
        )
        bundle = build_model(config.learner, layout)
        seen = take_update(Learner(config, layout, bundle), mode)
        if dist.get_rank() == 0:
            save_file({n: t.contiguous() for n, t in seen.items()}, out / f"{name}.{mode}.safetensors")
    dist.barrier()
    parallel_state.destroy_model_parallel()


def parse(text):
    """`pp2:pipeline_parallel=2` -> ("pp2", {"pipeline_parallel": 2})"""
    name, _, fields = text.partition(":")
    pairs = [f.split("=") for f in fields.split(",") if f]
    return name, {k: v == "true" if v in ("true", "false") else int(v) if v.isdigit() else v for k, v in pairs}


def main():
    folder, out, modes, *layouts = sys.argv[1:]
    for text in layouts:
        run_layout(Path(folder), Path(out), *parse(text), modes.split(","))
    parallel.shutdown()


if __name__ == "__main__":
    main()
