"""Merged adapters have the same bits whatever multiplies them: any order, any shard, any batch of rows."""

from __future__ import annotations

import pytest
import torch

from megathunder.learner.model import low_rank
from megathunder.learner.model.low_rank import merge, product


def factors(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """B [60, r] and A [r, 44], of very unlike rows and columns, some of them zero."""
    generator = torch.Generator().manual_seed(rank)
    b = torch.randn(60, rank, generator=generator) * torch.logspace(-6, 3, 60)[:, None]
    a = torch.randn(rank, 44, generator=generator) * torch.logspace(2, -8, 44)
    b[7], a[:, 5] = 0.0, 0.0
    return b.to(dtype), a.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 16, 200])
def test_a_product_is_the_same_in_any_order_shard_and_chunk(
    rank: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, a = factors(rank, dtype)
    whole = product(b, a, 0.3)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(0))
    assert torch.equal(product(b[:, order], a[order], 0.3), whole)
    assert torch.equal(product(b[20:40], a, 0.3), whole[20:40])
    assert torch.equal(product(b, a[:, 11:33], 0.3), whole[:, 11:33])
    monkeypatch.setattr(low_rank, "CHUNK", 100)
    assert torch.equal(product(b, a, 0.3), whole)


@pytest.mark.parametrize("rank", [1, 16, 200])
def test_a_product_is_within_a_float32_ulp_of_the_magnitudes_it_sums(rank: int) -> None:
    b, a = factors(rank, torch.float32)
    exact = 0.3 * (b.double() @ a.double())
    magnitude = 0.3 * (b.double().abs() @ a.double().abs())
    assert ((product(b, a, 0.3).double() - exact).abs() <= 2**-22 * magnitude).all()


def test_factors_of_zero_leave_the_weights_bit_for_bit() -> None:
    weight = torch.randn(6, 5).to(torch.bfloat16)
    assert torch.equal(merge(weight, torch.zeros(6, 2).bfloat16(), torch.randn(2, 5).bfloat16(), 2.0), weight)
