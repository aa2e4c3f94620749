"""SALT's coefficients: invariants of the geometry, closed forms at rank 1, the naive update in the features' space."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.objective_losses import salt_update

from megathunder.config.salt import SaltConfig
from megathunder.objectives.salt import cancellation, dominant_rank, reweigh

STRONG = SaltConfig(amplification=3.0, severe_cancellation=0.1, explained_share=0.6)
CASES = {"seed": st.integers(0, 10**6), "n": st.integers(2, 12), "shared": st.floats(0.0, 20.0)}


def draw(seed: int, n: int, shared: float) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Features [n, 16] with a common direction of this strength, coefficients that add up to 0."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, 16)) + shared * rng.standard_normal(16)
    weights = rng.standard_normal(n)
    return features, weights - weights.mean(), rng


@given(**CASES)
@settings(max_examples=25, deadline=None)
def test_the_update_is_the_naive_one_in_the_space_of_the_features(seed: int, n: int, shared: float) -> None:
    features, weights, _ = draw(seed, n, shared)
    got = reweigh(features @ features.T, weights, STRONG).coefficients @ features
    want = salt_update(
        torch.tensor(features),
        torch.tensor(weights),
        amplification=STRONG.amplification,
        explained_share=STRONG.explained_share,
        severe_cancellation=STRONG.severe_cancellation,
    ).numpy()
    assert np.linalg.norm(got - want) <= 1e-9 * max(np.linalg.norm(want), 1e-12)


@given(**CASES, scale=st.floats(1e-6, 1e6))
@settings(max_examples=25, deadline=None)
def test_rotation_and_scale_of_the_features_change_nothing(seed: int, n: int, shared: float, scale: float) -> None:
    features, weights, rng = draw(seed, n, shared)
    rotation, _ = np.linalg.qr(rng.standard_normal((16, 16)))
    turned = scale * features @ rotation
    before, after = (reweigh(f @ f.T, weights, STRONG) for f in (features, turned))
    assert np.allclose(before.coefficients, after.coefficients, rtol=1e-7, atol=1e-9)
    assert before.rank == after.rank and before.cancellation == pytest.approx(after.cancellation, abs=1e-7)


@given(**CASES)
@settings(max_examples=25, deadline=None)
def test_coefficients_permute_with_the_trajectories_and_scale_with_the_advantages(
    seed: int, n: int, shared: float
) -> None:
    features, weights, rng = draw(seed, n, shared)
    order = rng.permutation(n)
    before = reweigh(features @ features.T, weights, STRONG).coefficients
    after = reweigh(features[order] @ features[order].T, weights[order], STRONG).coefficients
    assert np.allclose(before[order], after, rtol=1e-7, atol=1e-9)
    assert np.allclose(reweigh(features @ features.T, 2.5 * weights, STRONG).coefficients, 2.5 * before, rtol=1e-9)


@given(**CASES)
@settings(max_examples=20, deadline=None)
def test_the_channels_are_orthogonal_and_the_residual_alone_grows(seed: int, n: int, shared: float) -> None:
    features, weights, _ = draw(seed, n, shared)
    found = reweigh(features @ features.T, weights, STRONG)
    plain, update = weights @ features, found.coefficients @ features
    extra = update - plain
    assert abs(extra @ (plain - extra / max(found.factor - 1.0, 1e-12))) <= 1e-8 * (plain @ plain + 1e-12)
    assert np.linalg.norm(update) >= np.linalg.norm(plain) * (1 - 1e-9)


@given(**CASES)
@settings(max_examples=20, deadline=None)
def test_without_amplification_or_severity_the_coefficients_are_the_same_bits(seed: int, n: int, shared: float) -> None:
    features, weights, _ = draw(seed, n, shared)
    for plain in (SaltConfig(measure=True), SaltConfig(amplification=5.0, severe_cancellation=0.999999)):
        found = reweigh(features @ features.T, weights, plain)
        assert found.factor != 1.0 or found.coefficients.tobytes() == weights.tobytes()
    assert reweigh(features @ features.T, weights, SaltConfig(measure=True)).coefficients is weights


def test_parallel_features_give_the_update_of_grpo_whatever_the_factor() -> None:
    lengths = np.array([1.0, -2.0, 0.5, 3.0])
    features = np.outer(lengths, [3.0, 4.0])
    weights = np.array([1.0, 0.7, -0.9, 0.2])
    found = reweigh(features @ features.T, weights, STRONG)
    assert found.rank == 1 and found.factor > 1.0
    assert np.allclose(found.coefficients @ features, weights @ features)
    shared = lengths * (lengths @ weights) / (lengths @ lengths)
    assert np.allclose(found.coefficients, shared + found.factor * (weights - shared))
    assert found.cancellation == pytest.approx(1 - (weights @ lengths) ** 2 / (weights**2 @ lengths**2))


def test_a_common_direction_and_orthogonal_rests_multiply_zero_sum_coefficients() -> None:
    n, common, rest = 6, 5.0, 0.5
    features = np.hstack([np.full((n, 1), common), rest * np.eye(n)])
    weights = np.array([1.0, 1.0, -0.5, -0.5, -0.5, -0.5])
    found = reweigh(features @ features.T, weights, STRONG)
    lost = common**2 / (common**2 + rest**2)
    factor = 1 + STRONG.amplification * (lost - 0.1) / 0.9
    assert found.rank == 1 and found.cancellation == pytest.approx(lost) and found.factor == pytest.approx(factor)
    assert np.allclose(found.coefficients, factor * weights)
    trace = n * (common**2 + rest**2)
    assert found.spectrum[0] == pytest.approx((n * common**2 + rest**2) / trace)


def test_equal_eigenvalues_are_not_cut_apart() -> None:
    assert dominant_rank(np.array([2.0, 1.0, 1.0, 1.0]), 0.5) == 4
    assert dominant_rank(np.array([3.0, 1.0, 0.5]), 0.5) == 1
    assert dominant_rank(np.array([3.0, 1.0, 0.0, 0.0]), 1.0) == 2


def test_nothing_and_what_is_not_finite_are_left_alone() -> None:
    weights = np.array([1.0, -1.0])
    for gram in (np.zeros((2, 2)), np.full((2, 2), np.nan)):
        found = reweigh(gram, weights, STRONG)
        assert found.coefficients is weights and found.factor == 1.0
    assert cancellation(np.eye(2), np.zeros(2)) == cancellation(np.eye(2), weights) == 0.0
    assert cancellation(np.ones((2, 2)), weights) == 1.0 and cancellation(np.ones((2, 2)), np.ones(2)) == 0.0
    assert reweigh(np.zeros((0, 0)), np.zeros(0), STRONG).rank == 0
