"""Operations against counts made by hand."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from megathunder.config.model_shape import ModelShape
from megathunder.planning.flops import (
    forward_flops,
    known_peak,
    measured_peak,
    row_flops,
    utilisation,
)
from megathunder.types import ContributionId, TrainRow

SHAPE = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_size=4, ffn=16, vocabulary=32)


def row(tokens: int, context: int = 0) -> TrainRow:
    return TrainRow(
        source=ContributionId(0, 0, 0),
        token_ids=(1,) * tokens,
        loss_mask=(0,) * context + (1,) * (tokens - context),
        engine_logprobs=(0.0,) * tokens,
        context_tokens=context,
    )


def test_utilisation_of_a_billion_parameters_over_ten_thousand_tokens() -> None:
    flops = 6 * 1e9 * 1e4
    assert utilisation(flops, 0.1, 1e15) == pytest.approx(0.6)
    assert utilisation(flops, 0.1 + 0.9, 1e15) == pytest.approx(0.06)
    assert utilisation(flops, 0.1, 0.0) is None


def test_weights_of_a_dense_layer() -> None:
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # query, key and value, output
    assert SHAPE.attention_parameters == attention == 192
    assert SHAPE.layer_matrices == SHAPE.active_layer_matrices == 2 * (192 + 3 * 8 * 16)
    assert SHAPE.parameters == SHAPE.layer_matrices + 2 * 32 * 8 + 5 * 8
    assert dataclasses.replace(SHAPE, tied=True).parameters == SHAPE.parameters - 32 * 8


def test_a_token_multiplies_with_its_own_experts_only() -> None:
    moe = dataclasses.replace(SHAPE, experts=8, experts_per_token=2, shared_experts=1, expert_ffn=4, dense_layers=1)
    expert = 3 * 8 * 4
    dense_layer, sparse_layer = 192 + 3 * 8 * 16, 192 + 8 * 8 + 9 * expert
    assert moe.layer_matrices == dense_layer + sparse_layer
    assert moe.active_layer_matrices == dense_layer + sparse_layer - 6 * expert


def test_attention_counts_actual_lengths() -> None:
    per_pair = 2 * 2 * 2 * 4  # 2 L h d
    assert forward_flops(SHAPE, tokens=10).attention == per_pair * 100
    assert forward_flops(SHAPE, tokens=10, context=6).attention == per_pair * (100 - 36)


def test_turns_cost_together_what_the_whole_chain_costs() -> None:
    whole = forward_flops(SHAPE, tokens=10, trained=4)
    parts = forward_flops(SHAPE, tokens=6, trained=1) + forward_flops(SHAPE, tokens=10, context=6, trained=3)
    assert parts == whole


def test_backward_is_twice_forward_and_logits_follow_the_mask() -> None:
    once = forward_flops(SHAPE, tokens=10, context=6, trained=4)
    assert row_flops(SHAPE, row(10, 6)).total == pytest.approx(3 * once.total)
    assert once.output == 2 * 32 * 8 * 4


def test_recompute_is_counted_apart() -> None:
    plain, again = row_flops(SHAPE, row(10)), row_flops(SHAPE, row(10), recompute=True)
    assert again.total == plain.total
    assert again.recompute == (plain.matrices + plain.attention) / 3


def test_a_chain_needs_the_same_however_its_turns_are_released() -> None:
    chain = row(10)
    turns = [msgspec.structs.replace(row(6), loss_mask=(1,) * 6), msgspec.structs.replace(chain, context_tokens=6)]
    reverse_pass = msgspec.structs.replace(chain, context_tokens=10)
    released = [row_flops(SHAPE, part) for part in (*turns, reverse_pass)]
    assert sum(part.total for part in released) == row_flops(SHAPE, chain).total


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("X", 0),
    ],
)
def test_gpus_are_known_by_their_whole_name(name: str, peak: float) -> None:
    assert known_peak(name) == peak


def test_a_measured_peak_is_a_rate() -> None:
    assert 1e6 < measured_peak(size=128, repeats=3) < 1e15
