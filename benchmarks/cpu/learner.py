"""Tokens per second of a learner's forward and backward, with its kernels and with torch's, in turn in one process."""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.cpu.model import VOCABULARY, write_model
from megathunder.accumulator_keys import BATCH
from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner import cpu_kernels
from megathunder.learner.learner import Learner
from megathunder.learner.parallel import initialize
from megathunder.types import ContributionId, Differentiate, TrainRow

LENGTHS = (130, 150, 170, 190, 210, 240, 280, 340)  # prompt included
PROMPT = 90
ROUNDING = 1.25  # times as far from the gradient in float64 as the plain path may the kernels be


def measure_learner(rounds: int) -> dict[str, object]:
    """Medians and every round, in tokens per second, and how far each gradient is from the one in float64."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        model = str(write_model(Path(name) / "model"))
        exact = _gradient(_learner(LearnerConfig(model=model, device="cpu", dtype="float64")))
        learner = _learner(LearnerConfig(model=model, device="cpu"))
    gemm = cpu_kernels.measure_gemm()
    paths: dict[str, Callable[[], None]] = {
        "plain": lambda: cpu_kernels.use(gemm="mkl", own=False),
        "kernels": lambda: cpu_kernels.use(gemm=gemm.taken, own=True),
    }
    rates: dict[str, list[float]] = defaultdict(list)
    gradients = {}
    for number in range(rounds + 1):
        for path, choose in paths.items():
            choose()
            started = time.perf_counter()
            gradients[path] = _gradient(learner)
            if number:  # the first round warms up
                rates[path].append(sum(LENGTHS) / (time.perf_counter() - started))
    errors = {path: _apart(gradient, exact) for path, gradient in gradients.items()}
    medians = {path: median(values) for path, values in rates.items()}
    gain = medians["kernels"] / medians["plain"]
    rate = f"{medians['plain']:.0f} -> {medians['kernels']:.0f} tokens/s ({gain:.2f})"
    print(f"learner: {rate}; gradients from float64: {errors}")
    return {
        "tokens": sum(LENGTHS),
        "median_tokens_per_s": medians,
        "rounds_tokens_per_s": rates,
        "gain": gain,
        "gradient_errors": errors,
        "gradients_apart": _apart(gradients["kernels"], gradients["plain"]),
        "exact": errors["kernels"] <= ROUNDING * errors["plain"],
        "gemm": {name: getattr(gemm, name) for name in gemm.__slots__},
    }


def _learner(settings: LearnerConfig) -> Learner:
    return Learner(Config(learner=settings), initialize(settings))


def _gradient(learner: Learner) -> torch.Tensor:
    """Of all parameters, flat; a copy."""
    learner.store.clear()
    learner.differentiate(_command())
    return torch.cat([gradient.flatten().double() for _, gradient in learner.gradients()])


def _apart(gradient: torch.Tensor, other: torch.Tensor) -> float:
    return float((gradient - other).norm() / other.norm())


def _command() -> Differentiate:
    rng = random.Random(0)
    rows = tuple(
        TrainRow(
            source=ContributionId(0, 0, i),
            token_ids=tuple(rng.randrange(1, VOCABULARY) for _ in range(length)),
            loss_mask=(0,) * PROMPT + (1,) * (length - PROMPT),
            engine_logprobs=(0.0,) * PROMPT + (-6.0,) * (length - PROMPT),
        )
        for i, length in enumerate(LENGTHS)
    )
    return Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=rows)
