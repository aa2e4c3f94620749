"""SALT: coefficients of a group-relative update, reweighted by the geometry of the gradients they multiply.

With features phi_i (the gradient of trajectory i), coefficients A_i (its advantage) and K_ij = <phi_i, phi_j>:

    K = V diag(l) V^T, l descending;  r = least with l_1 + ... + l_r >= explained * trace K    (equal l stay together)
    shared and residual channel       A_s = V_r V_r^T A,   A_r = A - A_s
    cancellation                      k = max(0, 1 - |sum A_i phi_i|^2 / sum A_i^2 |phi_i|^2)              in [0, 1]
    factor                            f = 1 + amplification * max(0, k - severe) / (1 - severe)
    reweighted                        A' = A_s + f A_r

A_s and A_r add up to orthogonal updates (A_s^T K A_r = 0): sum A'_i phi_i is the GRPO update with its component
outside the dominant subspace of the features enlarged f times. Coefficients depend on K alone, up to a factor
(rotations and scale of the features change nothing), and permute with the trajectories. f = 1 gives A, bit for bit.
k compares the signed sum with one of orthogonal terms: 0 where they do not meet or help each other, 1 if all is lost.

    all phi_i parallel     r = 1, A_r adds up to nothing: the update is GRPO's whatever f is
                           k = max(0, 1 - (sum A_i c_i)^2 / sum A_i^2 c_i^2)   with phi_i = c_i phi
    phi_i = s + e_i        (e_i orthogonal, of length e; l_1 = n |s|^2 + e^2): sum A = 0 gives A_s = 0, A' = f A,
                           k = |s|^2 / (|s|^2 + e^2)

From the abstract: a dominant shared subspace from the Gram geometry of the mini-batch, coefficients in shared and
residual channels, the residual amplified when signed cancellation is severe. Our reading is everything that is a
formula here: rank by explained share, cancellation against orthogonal terms, a linear ramp.
Called by the learner at the closure of a group (or of the batch). Pure; n x n arithmetic in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megathunder.config.salt import SaltConfig

TIES = 1e-9
"""Eigenvalues that differ by less than this share are one subspace, which is not cut."""
SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What was found of n trajectories, and their new coefficients [n]. `spectrum`: largest eigenvalues / trace."""

    coefficients: np.ndarray
    rank: int
    spectrum: tuple[float, ...]
    cancellation: float
    factor: float


def reweigh(gram: np.ndarray, coefficients: np.ndarray, settings: SaltConfig) -> Geometry:
    """The geometry of `gram` [n, n] and `coefficients` [n] (float64). Features that vanish, or are not finite, are left
    alone: the optimizer says what is to become of such a step."""
    trace = float(np.trace(gram))
    if not np.isfinite(gram).all() or trace <= 0.0:
        return Geometry(coefficients=coefficients, rank=0, spectrum=(), cancellation=0.0, factor=1.0)
    values, vectors = np.linalg.eigh((gram + gram.T) / 2.0)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    rank = dominant_rank(values, settings.explained_share)
    lost = cancellation(gram, coefficients)
    severe = settings.severe_cancellation
    factor = 1.0 + settings.amplification * max(0.0, lost - severe) / (1.0 - severe)
    new = coefficients
    if factor != 1.0:
        shared = vectors[:, :rank] @ (vectors[:, :rank].T @ coefficients)
        new = shared + factor * (coefficients - shared)
    spectrum = tuple(float(v) for v in values[:SHOWN] / values.sum())
    return Geometry(coefficients=new, rank=rank, spectrum=spectrum, cancellation=lost, factor=factor)


def dominant_rank(values: np.ndarray, explained_share: float) -> int:
    """Least number of leading `values` (descending) that hold this share of their sum; equal ones stay together."""
    reached = np.cumsum(values) >= explained_share * values.sum() * (1.0 - TIES)
    rank = int(np.argmax(reached)) + 1
    while rank < len(values) and values[rank] >= values[rank - 1] * (1.0 - TIES) and values[rank] > 0.0:
        rank += 1
    return rank


def cancellation(gram: np.ndarray, coefficients: np.ndarray) -> float:
    """Share of the squared length of orthogonal terms that the signed sum loses; 0 where nothing is added."""
    apart = float(coefficients**2 @ np.diag(gram))
    return min(max(1.0 - float(coefficients @ gram @ coefficients) / apart, 0.0), 1.0) if apart > 0.0 else 0.0
