"""One learner process on one device, for the tests of this folder: `python -m tests.gpu.rank JOB.json`.

CPU and CUDA need processes of their own (the CPU's adaptations replace parts of torch.cuda). What a job measures comes
back as JSON, tensors as safetensors beside it.
"""

from __future__ import annotations

import json
import random
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.config import Config
from megathunder.config.learner import LearnerConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.weights.names import canonical
from megathunder.learner.parallel import initialize
from megathunder.types import ContributionId, Differentiate, Fold, TakeStep, TrainRow

SHAPES = {
    "small": {"layers": 4, "hidden": 512, "heads": 8, "groups": 4, "ffn": 1536, "vocabulary": 4096},
    "large": {"layers": 16, "hidden": 2048, "heads": 16, "groups": 8, "ffn": 6144, "vocabulary": 32768},
}
GROUPS, SIZE = 2, 4


def make_learner(folder: Path, shape: str, *, placement: str = "device", **settings: Any) -> Learner:
    """A learner with seeded weights, the same on every device and in every kind of layer before rounding."""
    from tests.equality.worlds import write_model

    model = str(write_model(folder, **SHAPES[shape]))
    settings = LearnerConfig(model=model, accumulator_placement=placement, **settings)
    config = replace(Config(), learner=settings, streaming=StreamingConfig(pack_tokens=8192))
    layout = initialize(settings)
    bundle = build_model(settings, layout, load=False)
    for stage in bundle.stages:
        for name, parameter in stage.named_parameters():
            norm = "norm" in name
            generator = torch.Generator().manual_seed(zlib.crc32(canonical(name).encode()))
            noise = torch.randn(parameter.shape, generator=generator) * (0.05 if norm else parameter.shape[-1] ** -0.5)
            parameter.data.copy_(noise + 1.0 if norm else noise)
    return Learner(config, layout, bundle)


def rows(shape: str, length: int) -> list[TrainRow]:
    """GROUPS x SIZE chains of `length` tokens, their last three quarters trained."""
    rng = random.Random(5)
    vocabulary = SHAPES[shape]["vocabulary"]
    mask = tuple(int(t >= length // 4) for t in range(length))
    return [
        TrainRow(
            source=ContributionId(0, group, index),
            token_ids=tuple(rng.randrange(vocabulary) for _ in range(length)),
            loss_mask=mask,
            engine_logprobs=(0.0,) * length,
        )
        for group in range(GROUPS)
        for index in range(SIZE)
    ]


def differentiate(learner: Learner, item: int, target: AccumulatorKey, row: TrainRow, version: int) -> float:
    """One command; operations done."""
    command = Differentiate(item=item, update=version, policy_version=version, target=target, rows=(row,))
    return learner.differentiate(command).flops


def streamed(learner: Learner, chains: list[TrainRow], version: int = 0) -> float:
    """Every chain into its reward's accumulator, groups folded as they close; operations done."""
    done = 0.0
    for item, row in enumerate(chains):
        group, index = row.source.group, row.source.trajectory
        done += differentiate(learner, item, AccumulatorKey(AccumulatorKind.CLASS, group, index % 2), row, version)
        if index == SIZE - 1:
            keys = [AccumulatorKey(AccumulatorKind.CLASS, group, value) for value in range(2)]
            terms = tuple(FoldTerm(key, BATCH, (-1.0, 1.0)[key.slot]) for key in keys)
            learner.fold(Fold(item=1000 + group, update=version, terms=terms, free=tuple(keys)))
    return done


def barrier(learner: Learner, chains: list[TrainRow], version: int = 0) -> float:
    """Every chain with its coefficient, straight into the batch; operations done."""
    scaled = [
        TrainRow(
            **{n: getattr(row, n) for n in row.__struct_fields__} | {"scale": (-1.0, 1.0)[row.source.trajectory % 2]}
        )
        for row in chains
    ]
    return sum(differentiate(learner, item, BATCH, row, version) for item, row in enumerate(scaled))


WAYS = {"streamed": streamed, "barrier": barrier}


def gradient(job: dict, out: Path) -> dict:
    """The gradient of one update on this device, as float32, and the log-probability gap to 0 as a fingerprint."""
    learner = make_learner(out.parent / out.stem, "small", **job["learner"])
    WAYS[job["way"]](learner, rows("small", job["tokens"]))
    if learner.arithmetic.exact:
        raise ValueError("measured in floating point")
    save_file(
        {canonical(name): view.float().cpu().contiguous() for name, view in learner.gradients()},
        out.with_suffix(".safetensors"),
    )
    exposed = learner.take_step(TakeStep(item=1, update=0, normaliser=1.0)).exposed_copy_s
    return {"exposed_copy_s": exposed}


def timing(job: dict, out: Path) -> dict:
    """Seconds of whole updates, the ways in turn; what the copies exposed; utilisation as the driver tells it."""
    from megathunder.planning.flops import known_peak, utilisation
    from megathunder.planning.memory import gpu_use

    learner = make_learner(out.parent / out.stem, "large", **job["learner"])
    chains, taken, driver = rows("large", job["tokens"]), [], []
    for version in range(2 * (job["repeats"] + 1)):
        way = ("streamed", "barrier")[version % 2]
        torch.cuda.synchronize()
        started = time.perf_counter()
        flops = WAYS[way](learner, chains, version)
        torch.cuda.synchronize()
        worked_s = time.perf_counter() - started
        driver.append(gpu_use())
        stats = learner.take_step(TakeStep(item=1, update=version, normaliser=1.0))
        torch.cuda.synchronize()
        if version >= 2:  # the first of each way builds kernels
            step_s = time.perf_counter() - started
            peak = known_peak(torch.cuda.get_device_name())
            taken.append({"way": way, "worked_s": worked_s, "step_s": step_s, "mfu": utilisation(flops, step_s, peak)})
            taken[-1]["exposed_copy_s"] = stats.exposed_copy_s
    return {
        "device": torch.cuda.get_device_name(),
        "parameters": learner.local_parameters,
        "updates": taken,
        "utilisation": max(use.utilisation for use in driver if use) if any(driver) else None,
        "memory_bytes": max(use.memory_bytes for use in driver if use) if any(driver) else None,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
    }


JOBS = {"gradient": gradient, "timing": timing}


def main(path: Path) -> None:
    """Do the job and write its answer."""
    job = json.loads(path.read_text())
    path.with_suffix(".out.json").write_text(json.dumps(JOBS[job["kind"]](job, path)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
