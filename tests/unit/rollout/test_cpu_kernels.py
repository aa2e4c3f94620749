"""The CPU server's kernels, in C and in torch, against each operation written out."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from megathunder.rollout.servers.cpu_kernels.compiled import CompiledKernels, compile_kernels
from megathunder.rollout.servers.cpu_kernels.interface import Heads, Step
from megathunder.rollout.servers.cpu_kernels.packed_weights import PackedWeights
from megathunder.rollout.servers.cpu_kernels.portable import PortableKernels

SHAPES = [(4, 2, 64, 64), (2, 2, 32, 32), (3, 1, 128, 64), (2, 1, 24, 8)]  # H, G, D, R
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler on this machine")
    kernels = compile_kernels(tmp_path_factory.mktemp("kernels"))
    assert isinstance(kernels, CompiledKernels), kernels
    return kernels


@pytest.fixture(params=["compiled", "torch"])
def kernels(request):
    return request.getfixturevalue("compiled") if request.param == "compiled" else PortableKernels()


def a_step(lengths, fresh, *, slots_at_all=400, seed=0):
    """Sequences of `lengths` positions in scattered slots, in rows of the table that are not in order."""
    torch.manual_seed(seed)
    table = torch.zeros(len(lengths) + 3, max(lengths) + 5, dtype=torch.int32)
    rows = torch.randperm(len(lengths) + 3)[: len(lengths)]
    free = torch.randperm(slots_at_all)
    positions, slots = [], []
    for row, length, count in zip(rows.tolist(), lengths, fresh or [1] * len(lengths)):
        mine, free = free[:length], free[length:]
        table[row, :length] = mine.to(torch.int32)
        positions.append(torch.arange(length - count, length))
        slots.append(mine[length - count :])
    return Step(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        table=table,
        rows=rows,
        lengths=torch.tensor(lengths),
        fresh=None if fresh is None else torch.tensor(fresh),
    )


def some_heads(shape, *, normed=True):
    heads, groups, size, rotary = shape
    angles = torch.rand(600, rotary // 2) * 6
    norm = [torch.rand(size) + 0.5 if normed else None for _ in range(2)]
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    return Heads(
        heads=heads,
        kv_heads=groups,
        size=size,
        scale=0.3,
        cos_sin=cos_sin,
        query_norm=norm[0],
        key_norm=norm[1],
        eps=1e-6,
    )


def written_out(qkv, heads, step, keys, values):
    """Row after row, in float64."""
    count = len(step.lengths)
    fresh = [1] * count if step.fresh is None else step.fresh.tolist()
    owner = [b for b in range(count) for _ in range(fresh[b])]
    query = qkv.double().view(len(owner), -1, heads.size)[:, : heads.heads]
    out = []
    for i, b in enumerate(owner):
        seen = step.table[step.rows[b], : int(step.positions[i]) + 1].long()
        for h in range(heads.heads):
            g = h * heads.kv_heads // heads.heads
            weights = (keys[seen, g].double() @ query[i, h] * heads.scale).softmax(0)
            out.append(weights @ values[seen, g].double())
    return torch.stack(out).view(len(owner), -1).float()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fresh", [None, [1, 7, 12, 5]])
def test_attention_is_that_of_each_sequence_alone(kernels, shape, fresh):
    step, heads = a_step([9, 60, 12, 33], fresh), some_heads(shape)
    rows = len(step.positions)
    keys, values = torch.randn(2, 400, shape[1], shape[2]).unbind()
    qkv = torch.randn(rows, (shape[0] + 2 * shape[1]) * shape[2])
    torch.testing.assert_close(
        kernels.attend(qkv, heads, step, keys, values), written_out(qkv, heads, step, keys, values), **CLOSE
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_compiled_attention_has_the_same_bits_in_any_batch_and_on_any_threads(compiled, threads):
    heads = some_heads(SHAPES[0])
    keys, values = torch.randn(2, 400, 2, 64).unbind()
    before = torch.get_num_threads()
    try:
        for fresh in (None, [2, 7, 3, 5]):
            step = a_step([9, 60, 12, 33], fresh)
            qkv = torch.randn(len(step.positions), 8 * 64)
            torch.set_num_threads(threads)
            together = compiled.attend(qkv, heads, step, keys, values)
            torch.set_num_threads(1)
            first = 0
            for b, count in enumerate(fresh or [1] * 4):
                alone = Step(
                    positions=step.positions[first : first + count],
                    slots=step.slots[first : first + count],
                    table=step.table,
                    rows=step.rows[b : b + 1],
                    lengths=step.lengths[b : b + 1],
                    fresh=None if fresh is None else step.fresh[b : b + 1],
                )
                rows = slice(first, first + count)
                assert torch.equal(compiled.attend(qkv[rows], heads, alone, keys, values), together[rows])
                first += count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_normed_and_rotated_and_reach_the_cache(kernels, shape, normed):
    heads, groups, size, rotary = shape
    step, form = a_step([9, 60, 12], [4, 9, 1]), some_heads(shape, normed=normed)
    keys, values = torch.zeros(2, 400, groups, size).unbind()
    qkv = torch.randn(14, (heads + 2 * groups) * size)
    expected = qkv.clone().view(14, -1, size)
    for part, weight in ((slice(0, heads), form.query_norm), (slice(heads, heads + groups), form.key_norm)):
        x = expected[:, part]
        if normed:
            x = x / (x.square().mean(-1, keepdim=True) + form.eps).sqrt() * weight
        cos, sin = form.cos_sin[step.positions][:, None].chunk(2, -1)
        a, b = x[..., : rotary // 2], x[..., rotary // 2 : rotary]
        expected[:, part] = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., rotary:]], -1)
    kernels.prepare_heads(qkv, form, step, keys, values)
    got = qkv.view(14, -1, size)
    torch.testing.assert_close(got[:, : heads + groups], expected[:, : heads + groups], **CLOSE)
    assert torch.equal(keys[step.slots], got[:, heads : heads + groups])
    assert torch.equal(values[step.slots], expected[:, heads + groups :])


def test_norm_adds_to_the_residual_and_activation_gates(kernels):
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.rand(96)
    total = x + residual
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5, residual), expected, **CLOSE)
    assert torch.equal(residual, total)
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), plain, **CLOSE)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(kernels.silu_mul(x), gate * gate.sigmoid() * up, **CLOSE)


def test_a_packed_product_follows_its_weight_only_when_it_is_told():
    layer, packed = torch.nn.Linear(40, 24), PackedWeights()
    for rows in (1, 3, 33, 200):
        x = torch.randn(rows, 40)
        torch.testing.assert_close(packed.linear(layer, x, layer.bias), layer(x), **CLOSE)
    with torch.no_grad():
        layer.weight.data.mul_(2)  # as weight loaders write: autograd's version counter does not see it
    packed.invalidate()
    torch.testing.assert_close(packed.linear(layer, x, layer.bias), layer(x), **CLOSE)


def test_without_a_compiler_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in compile_kernels(tmp_path)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such option >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CC", "cc")
    assert "no such option" in compile_kernels(tmp_path / "other")


def test_loading_the_kernels_leaves_denormal_numbers_alone():
    check = "from megathunder.rollout.servers.cpu_kernels.compiled import compile_kernels as c; k = c(); "
    check += "x = 5e-324; y = float('1e-310'); print(isinstance(k, str) or (x > 0 and y * 0.5 > 0.0))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
