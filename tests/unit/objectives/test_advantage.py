"""Advantages: the table of design section 2, the reported faults of other trainers, refusals by name."""

import itertools
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.advantages import advantages

from megathunder.config.streamable import NORMALISATIONS, NOT_STREAMABLE
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.advantage import (
    GroupStatistics,
    check_normalisation,
)


@pytest.mark.parametrize(
    ("normalisation", "one", "zero"),
    [
        ("sample_std", 1.2076, -0.7246),
        ("std", 1.2910, -0.7746),
        ("none", 0.625, -0.375),
        ("leave_one_out", 0.7143, -0.4286),
    ],
)
def test_three_successes_of_eight_give_the_tabulated_advantages(normalisation: str, one: float, zero: float) -> None:
    got = advantages([1] * 3 + [0] * 5, [8], normalisation)
    assert got == pytest.approx([one] * 3 + [zero] * 5, abs=5e-5)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_equal_rewards_contribute_exactly_zero_even_when_rounded_to_16_bits(normalisation: str) -> None:
    bf16 = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 0.7))[0] & 0xFFFF0000))[0]
    fp16 = struct.unpack("<e", struct.pack("<e", 0.7))[0]
    for value in (0.7, bf16, fp16):
        assert advantages([value] * 8, [8], normalisation) == [0.0] * 8


def test_groups_of_different_sizes_keep_their_own_mean() -> None:
    assert advantages([1, 0, 1, 0, 1], [3, 2], "none") == pytest.approx([1 / 3, -2 / 3, 1 / 3, -0.5, 0.5])


def test_group_sizes_that_do_not_add_up_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="4 for 5"):
        advantages([1, 0, 1, 0, 1], [2, 2], "none")


def test_infrastructure_failure_counts_in_no_statistic() -> None:
    got = advantages([1, 0, None, 1], [4], "none")
    assert got == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])


@pytest.mark.parametrize("normalisation", ["std", "sample_std", "leave_one_out"])
def test_group_of_one_is_a_configuration_error(normalisation: str) -> None:
    with pytest.raises(ConfigError, match="groups of 1"):
        check_normalisation(normalisation, 1)
    check_normalisation("none", 1)


@pytest.mark.parametrize("name", sorted(NOT_STREAMABLE))
def test_what_is_not_affine_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){name}.*affine"):
        check_normalisation(name, 8)


def test_one_survivor_contributes_exactly_zero() -> None:
    for normalisation in NORMALISATIONS:
        assert advantages([None, 1.0, None], [3], normalisation) == [0.0] * 3


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(UserError, match="finite"):
        GroupStatistics.of([1.0, math.nan])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=7), st.sampled_from(NORMALISATIONS))
def test_advantages_sum_to_zero_and_do_not_depend_on_order(rewards: list[float], normalisation: str) -> None:
    got = advantages(rewards, [len(rewards)], normalisation)
    assert abs(math.fsum(got)) <= 1e-6 * max(1.0, max(map(abs, got)))
    statistics = GroupStatistics.of(rewards)
    for order in itertools.islice(itertools.permutations(rewards), 24):
        assert GroupStatistics.of(order) == statistics


def test_worked_check_of_the_design() -> None:
    rewards, gradients = [1, 0, 0, 1, 1], [2, -1, 3, 0.5, -2]
    got = advantages(rewards, [5], "sample_std", 1e-6)
    assert -sum(a * g for a, g in zip(got, gradients, strict=True)) / 5 == pytest.approx(0.365148, abs=1e-6)
    assert -sum(a * g for a, g in zip(got, gradients, strict=True)) / 15 == pytest.approx(0.121716, abs=1e-6)
