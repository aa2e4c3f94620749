"""Advantages: the table of design section 2, the reported faults of other trainers, refusals by name."""

import itertools
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.advantages import advantages as naive
from oracles.advantages import group_advantages

from megathunder.config.objective import GrpoConfig
from megathunder.config.streamable import NOT_STREAMABLE
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.advantage import BUILT_IN, Advantage, GroupStatistics, best_of_k, find_advantage

SINGLE = sorted(set(BUILT_IN) - {"gdpo"})
MEAN_FREE = [name for name in SINGLE if name not in ("pass_at_k", "maxrl")]


def advantages(rewards, sizes, name, epsilon=1e-6):
    """Of the package, group by group."""
    config, result, start = GrpoConfig(advantage=name, epsilon=epsilon), [], 0
    for size in sizes:
        signals = [(float(r),) for r in rewards[start : start + size] if r is not None]
        weights = BUILT_IN[name].weights(signals, config) if signals else None
        result += [0.0 if r is None else weights.weight((float(r),)) for r in rewards[start : start + size]]
        start += size
    return result


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


@pytest.mark.parametrize("normalisation", SINGLE)
def test_equal_rewards_contribute_exactly_zero_even_when_rounded_to_16_bits(normalisation: str) -> None:
    bf16 = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 0.7))[0] & 0xFFFF0000))[0]
    fp16 = struct.unpack("<e", struct.pack("<e", 0.7))[0]
    for value in (0.7, bf16, fp16):
        assert advantages([value] * 8, [8], normalisation) == [0.0] * 8


def test_groups_of_different_sizes_keep_their_own_mean() -> None:
    assert advantages([1, 0, 1, 0, 1], [3, 2], "none") == pytest.approx([1 / 3, -2 / 3, 1 / 3, -0.5, 0.5])


def test_group_sizes_that_do_not_add_up_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="4 for 5"):
        naive([1, 0, 1, 0, 1], [2, 2], "none")


def test_infrastructure_failure_counts_in_no_statistic() -> None:
    got = advantages([1, 0, None, 1], [4], "none")
    assert got == pytest.approx([1 / 3, -2 / 3, 0, 1 / 3])


@pytest.mark.parametrize("normalisation", ["std", "sample_std", "leave_one_out"])
def test_group_of_one_is_a_configuration_error(normalisation: str) -> None:
    with pytest.raises(ConfigError, match="group_size = 1"):
        find_advantage(GrpoConfig(advantage=normalisation), 1)
    find_advantage(GrpoConfig(advantage="none"), 1)
    with pytest.raises(ConfigError, match="at least 5"):
        find_advantage(GrpoConfig(advantage="pass_at_k", pass_k=4), 4)


@pytest.mark.parametrize("name", sorted(NOT_STREAMABLE))
def test_what_cannot_be_streamed_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){name}.*own group"):
        find_advantage(GrpoConfig(advantage=name), 8)


def test_one_survivor_contributes_exactly_zero() -> None:
    for normalisation in SINGLE:
        assert advantages([None, 1.0, None], [3], normalisation) == [0.0] * 3


def test_infinite_rewards_are_refused() -> None:
    with pytest.raises(UserError, match="finite"):
        GroupStatistics.of([1.0, math.nan])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=7), st.sampled_from(MEAN_FREE))
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


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 2.0]), min_size=2, max_size=7),
    st.sampled_from(SINGLE),
)
def test_built_in_advantages_equal_the_textbook(rewards: list[float], name: str) -> None:
    assert advantages(rewards, [len(rewards)], name) == pytest.approx(group_advantages(rewards, name), abs=1e-9)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7), st.integers(1, 6))
def test_the_best_of_one_is_leave_one_out_and_any_k_keeps_the_mean_of_zero(rewards: list[int], k: int) -> None:
    values = [float(r) for r in rewards]
    if k < len(values):
        got = best_of_k(values, k)
        assert math.fsum(got) == pytest.approx(0.0, abs=1e-9)
        assert got == pytest.approx(group_advantages(values, "pass_at_k", k=k), abs=1e-9)
    assert best_of_k(values, 1) == pytest.approx(group_advantages(values, "leave_one_out"), abs=1e-9)


def test_rewards_below_zero_have_no_maxrl_advantage() -> None:
    with pytest.raises(UserError, match="(?s)maxrl.*reward of -1.*at least 0"):
        advantages([-1.0, 1.0], [2], "maxrl")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda rewards: [0.0, 1.0, 2.0], "gave 0.0 and 1.0 to two rewards of 1.0"),
        (lambda rewards: [0.0], r"answered \[0.0\]"),
        (lambda rewards: [math.nan] * 3, "answered"),
        (lambda rewards: [1 / 0], "raised ZeroDivisionError"),
        (lambda rewards: None, "raised TypeError"),
    ],
)
def test_a_function_that_is_no_table_of_advantages_is_refused(function, text: str) -> None:
    mine = Advantage(table=lambda rewards, config: function(rewards), name="adv.py:f")
    with pytest.raises(UserError, match=f"(?s)adv.py:f.*{text}.*3 finite numbers"):
        mine.weights([(1.0,), (1.0,), (0.0,)], GrpoConfig())


def test_a_users_function_is_found_by_its_file_and_a_wrong_name_lists_the_known_ones(tmp_path) -> None:
    (tmp_path / "adv.py").write_text("def ranks(rewards):\n    return [sum(r > o for o in rewards) for r in rewards]\n")
    found = find_advantage(GrpoConfig(advantage=f"{tmp_path / 'adv.py'}:ranks"), 4)
    weights = found.weights([(3.0,), (1.0,), (3.0,)], GrpoConfig())
    assert [weights.weight((r,)) for r in (3.0, 1.0)] == [1.0, 0.0] and not found.affine
    with pytest.raises(ConfigError, match=r"(?s)gdpo.*sample_std.*did you mean 'leave_one_out'"):
        find_advantage(GrpoConfig(advantage="leave_one"), 4)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_rewards_at_the_ends_of_the_floats_are_refused_or_equal(name: str) -> None:
    config = GrpoConfig(advantage=name, epsilon=0.0)
    for rewards in ([1e300, 0.0, 0.0], [1.7e308, 1.7e308, 0.0], [1e308, -1e308, 0.0]):
        with pytest.raises(UserError, match="at most 1e[+]30"):
            BUILT_IN[name].weights([(r,) for r in rewards], config)
    for rewards in ([1e-200, 0.0, 0.0], [5e-324, 0.0, 0.0], [1e-170, 1e-160, 0.0]):
        weights = BUILT_IN[name].weights([(r,) for r in rewards], config)
        assert all(abs(weights.weight((r,))) < 1e-150 for r in rewards)
    last_bit = BUILT_IN[name].weights([(0.3,), (0.1 + 0.2,), (0.3,)], config)
    assert all(abs(last_bit.weight((r,))) < 10.0 for r in (0.3, 0.1 + 0.2))


def test_an_advantage_function_that_exits_is_named() -> None:
    def leaves(rewards):
        raise SystemExit(0)

    found = Advantage(table=lambda rewards, _: leaves(rewards), name="adv.py:leaves")
    with pytest.raises(UserError, match="adv.py:leaves.*raised SystemExit"):
        found.weights([(1.0,), (0.0,)], GrpoConfig())
