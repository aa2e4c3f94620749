"""Which kernels a learner on a CPU computes with in float32: chosen by a short measurement, once a process.

    GEMM         oneDNN's kernel where it is the faster one and computes in true float32; else torch's default (MKL)
    attention    with oneDNN, whose batched products are fast: those, for short rows (`model/short_attention.py`)
    RMSNorm      a forward and a backward of our own (`model/rmsnorm.py`)

torch hands float32 products to oneDNN only at float32_matmul_precision "medium", which also allows bfloat16 arithmetic.
ONEDNN_MAX_CPU_ISA keeps oneDNN to instructions that have none worth it (no AMX), and the measurement compares its
product with one in float64, so a kernel that rounds is never taken. Called by `parallel.initialize`; float64 and
bfloat16 models are left alone.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

ISA_CAP = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
SIDE, DEPTH, ROUNDS = 512, 512, 6  # 0.27 GFLOP a product: about 50 ms for both kernels on a slow core
MARGIN = 1.15  # below it the default stays: noise must not change what a run computes with
LARGEST_ERROR = 2e-5  # of a sum of DEPTH products of unit normals, relative to its size; bfloat16 has 3e-3
PRECISION = {"mkl": "highest", "onednn": "medium"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmChoice:
    """The measured kernels in GFLOP/s on one thread, and the one taken."""

    taken: str
    mkl_gflops: float
    onednn_gflops: float
    onednn_error: float

    def describe(self) -> str:
        names = {"mkl": "torch's default", "onednn": "oneDNN"}
        return (
            f"learner GEMM in float32: {names[self.taken]} ({names['mkl']} {self.mkl_gflops:.0f}, {names['onednn']} "
            f"{self.onednn_gflops:.0f} GFLOP/s a core, error {self.onednn_error:.0e})"
        )


class _Active:
    norms, attention = True, False


def own_norms() -> bool:
    """Whether float32 norms on a CPU take our own path."""
    return _Active.norms


def own_attention() -> bool:
    """Whether float32 attention over short rows on a CPU takes our own path."""
    return _Active.attention


def cap_instructions() -> None:
    """Must run before the process's first product: oneDNN reads the cap once."""
    os.environ.setdefault(*ISA_CAP)


def measure_gemm() -> GemmChoice:
    """Time both kernels on one thread, alternating, best of ROUNDS; the faster one is taken if it is exact."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, DEPTH, generator=generator) for _ in range(2))
    best = dict.fromkeys(PRECISION, float("inf"))
    torch.set_num_threads(1)
    try:
        for _ in range(ROUNDS):
            for name, setting in PRECISION.items():
                torch.set_float32_matmul_precision(setting)
                started = time.thread_time()
                product = a @ b.T
                best[name] = min(best[name], time.thread_time() - started)
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
    error = float((product.double() - a.double() @ b.double().T).abs().max()) / DEPTH**0.5
    rates = {name: 2e-9 * SIDE * SIDE * DEPTH / seconds for name, seconds in best.items()}
    better = error < LARGEST_ERROR and rates["onednn"] > MARGIN * rates["mkl"]
    return GemmChoice(
        taken="onednn" if better else "mkl",
        mkl_gflops=rates["mkl"],
        onednn_gflops=rates["onednn"],
        onednn_error=error,
    )


def use(*, gemm: str, own: bool) -> None:
    """Compute with `gemm` (`mkl` or `onednn`), and with `own` norms and what attention goes with it, from now on."""
    torch.set_float32_matmul_precision(PRECISION[gemm])
    _Active.norms, _Active.attention = own, own and gemm == "onednn"
