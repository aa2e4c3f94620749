"""A CPU learner's own attention and norms against torch's, and the choice of its GEMM."""

from __future__ import annotations

import pytest
import torch

from megathunder.config.learner import LearnerConfig
from megathunder.learner import cpu_kernels, parallel
from megathunder.learner.model import short_attention
from megathunder.learner.model.attention import AttentionContext, Prefix, RowSpan, _attend
from megathunder.learner.model.rmsnorm import RmsNorm

HEADS, HEAD = 6, 16


@pytest.fixture(autouse=True)
def restored():
    yield
    cpu_kernels.use(gemm="mkl", own=True)


def gradients(compute, leaves, *, own):
    cpu_kernels.use(gemm="onednn", own=own)
    out = compute()
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def check(compute, leaves):
    for ours, plain in zip(gradients(compute, leaves, own=True), gradients(compute, leaves, own=False), strict=True):
        assert float((ours - plain).norm()) <= 1e-6 * float(plain.norm())


def spans_of(kind):
    prefix = Prefix(layers={}, tokens=5)
    return {
        "equal": [RowSpan(length=40)] * 3,
        "ragged": [RowSpan(length=n) for n in (50, 3, 41, 17)],
        "prefix": [RowSpan(length=n, start=5, prefix=prefix, prefix_tokens=5) for n in (9, 30, 31)],
        "parent": [RowSpan(length=20), *[RowSpan(length=n, start=20, parent=0, parent_tokens=20) for n in (7, 12)]],
    }[kind]


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize("kind", ["equal", "ragged", "prefix", "parent"])
def test_short_rows_have_the_outputs_and_gradients_of_torch_attention(kind, groups, monkeypatch):
    context = AttentionContext.of(spans_of(kind))
    before = sum(p.tokens for p in context.prefixes)
    generator = torch.Generator().manual_seed(0)
    sizes = ((context.tokens, HEADS), (before + context.tokens, groups), (before + context.tokens, groups))
    q, k, v = (torch.randn(*size, HEAD, generator=generator).requires_grad_() for size in sizes)
    calls = []
    monkeypatch.setattr(short_attention, "attend_short", counted(short_attention.attend_short, calls))
    check(lambda: torch.cat([_attend(group, q, k, v, None) for group in context.groups]), (q, k, v))
    assert len(calls) == len(context.groups)


def counted(function, calls):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call


def test_long_rows_and_other_types_keep_torch_attention():
    q = torch.randn(600, HEADS, HEAD)
    assert short_attention.fits(q, q, q, (2, 300, 300))
    assert not short_attention.fits(q, q, q, (1, 600, 600))
    assert not short_attention.fits(q, q, q, (400, 300, 300))
    assert not short_attention.fits(q.double(), q.double(), q.double(), (2, 300, 300))


@pytest.mark.parametrize("shape", [(7, 1, 96), (30, 1, 4, 16)])
def test_the_norm_has_the_outputs_and_gradients_of_torch(shape):
    class Settings:
        params_dtype, sequence_parallel = torch.float32, False

    norm = RmsNorm(Settings, shape[-1], eps=1e-6)
    torch.nn.init.uniform_(norm.weight)
    x = torch.randn(shape).requires_grad_()
    check(lambda: norm(x), (x, norm.weight))


def test_the_gemm_that_is_taken_is_exact_and_the_faster_one(monkeypatch):
    choice = cpu_kernels.measure_gemm()
    assert torch.get_float32_matmul_precision() == "highest"
    faster = choice.onednn_gflops > cpu_kernels.MARGIN * choice.mkl_gflops
    assert (choice.taken == "onednn") == (faster and choice.onednn_error < cpu_kernels.LARGEST_ERROR)
    monkeypatch.setattr(cpu_kernels, "LARGEST_ERROR", choice.onednn_error / 2)  # as if it had rounded to bfloat16
    assert cpu_kernels.measure_gemm().taken == "mkl"
    a, b = torch.randn(2, 512, 512)
    rounded = (a.bfloat16() @ b.bfloat16().T).double()
    assert float((rounded - a.double() @ b.double().T).abs().max()) / 512**0.5 > 100 * 2e-5


@pytest.mark.parametrize(
    ("accumulator", "kernels", "measured"), [("fp32", "auto", True), ("exact", "auto", False), ("fp32", "off", False)]
)
def test_exact_sums_and_the_default_compute_with_nothing_that_the_clock_chose(
    accumulator, kernels, measured, monkeypatch
):
    asked, taken = [], []
    choice = cpu_kernels.GemmChoice(taken="onednn", mkl_gflops=1.0, onednn_gflops=2.0, onednn_error=0.0)
    monkeypatch.setattr(parallel, "_measured_gemm", lambda: asked.append(1) or choice)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(cpu_kernels, "use", lambda *, gemm, own: taken.append(gemm))
    parallel._choose_kernels(LearnerConfig(accumulator=accumulator, cpu_kernels=kernels), 0)
    assert (bool(asked), taken) == (measured, ["onednn" if measured else "mkl"])
