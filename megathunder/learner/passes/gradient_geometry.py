"""SALT at the closure: inner products of the gradients that wait in accumulators of their own, and new coefficients.

    scope group    Fold of a group           K over its trajectories, new coefficients, then the fold as always
    scope batch    Fold of a group           kept; `finish`, before the step: K over all, new coefficients, all folds

    features exact     K_ij = <g_i, g_j> over all gradient elements, float64, a piece at a time
    features sketch    p_i = P g_i, P a sparse sign matrix from the seed (every element goes to one of m numbers with a
                       sign of its own): E <p_i, p_j> = <g_i, g_j>, variance at most 2 |g_i|^2 |g_j|^2 / m.
                       Its error is measured: mean of | |p_i|^2 / |g_i|^2 - 1 | over the projected layers

Cells never wait for each other before the barrier: over several, scope batch takes sketches, which the barrier gathers.
Called by `release.py` and, through it, by the barrier. Knows nothing of rewards: coefficients come with the fold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.learner.accumulators.store import AccumulatorStore
from megathunder.learner.passes.backward import WorkCounters
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.salt import Geometry, reweigh
from megathunder.types import Fold
from megathunder.work_stats import SaltStats

PIECE = 1 << 17  # elements of each gradient worked on at once


class GradientGeometry:
    """Reweighs folds of `store`."""

    def __init__(self, config: Config, store: AccumulatorStore) -> None:
        self._settings, self._store, self._seed = config.salt, store, config.run.seed
        self._sketch = Sketch(config, store) if config.salt.features == "sketch" else None
        self._kept: list[Fold] = []

    @classmethod
    def of(cls, config: Config, store: AccumulatorStore) -> GradientGeometry | None:
        """None where coefficients stay as they are."""
        return cls(config, store) if build_objective(config).keeps_each_gradient else None

    def fold(self, fold: Fold, counters: WorkCounters) -> Fold | None:
        """`fold` with new coefficients; None where it is kept for the barrier."""
        if not any(_is_own(term) for term in fold.terms):
            return fold
        if self._settings.scope == "batch":
            self._kept.append(fold)
            return None
        return self._reweighed([fold], counters)[0]

    def finish(self, counters: WorkCounters) -> list[Fold]:
        """The folds that were kept, with new coefficients. Every rank of the job takes part."""
        kept, self._kept = self._kept, []
        return self._reweighed(kept, counters) if self._settings.scope == "batch" else []

    def clear(self) -> None:
        self._kept.clear()

    def _reweighed(self, folds: Sequence[Fold], counters: WorkCounters) -> list[Fold]:
        terms = [term for fold in folds for term in fold.terms if _is_own(term)]
        own = np.array([term.coefficient for term in terms])
        everyone = dist.get_world_size() if self._settings.scope == "batch" and dist.is_initialized() else 1
        if everyone == 1 and not terms:
            return list(folds)
        if everyone == 1:
            found = reweigh(self._gram([term.source for term in terms], counters), own, self._settings)
            mine = found.coefficients
        else:
            found, mine = self._over_ranks([term.source for term in terms], own, everyone, counters)
        if everyone == 1 or dist.get_rank() == 0:
            _note(found, counters)
        new = {term.source: float(value) for term, value in zip(terms, mine, strict=True)}
        return [_with_coefficients(fold, new) for fold in folds]

    def _gram(self, keys: Sequence[AccumulatorKey], counters: WorkCounters) -> np.ndarray:
        """[n, n] float64."""
        if self._sketch:
            projected = self._sketch.project(keys, counters)
            return projected @ projected.T
        gram = torch.zeros(len(keys), len(keys), dtype=torch.float64)
        gradients = self._store.read(keys)
        for bucket in range(len(self._store.layout.homes)):
            flats = [flats[bucket] for flats in gradients]
            for at in range(0, flats[0].numel() if flats else 0, PIECE):
                piece = torch.stack([flat[at : at + PIECE].to(torch.float64) for flat in flats])
                gram += (piece @ piece.T).cpu()
        return gram.numpy() * self._store.unit**2

    def _over_ranks(
        self, keys: Sequence[AccumulatorKey], own: np.ndarray, ranks: int, counters: WorkCounters
    ) -> tuple[Geometry, np.ndarray]:
        """The geometry over all ranks' trajectories, in the order of their keys, and this rank's coefficients."""
        assert self._sketch, "laws ask for sketches over several cells"
        parts: list[tuple[list[AccumulatorKey], np.ndarray, np.ndarray] | None] = [None] * ranks
        dist.all_gather_object(
            parts, (list(keys), own, self._sketch.project(keys, counters))
        )  # of this job's own ranks
        rows = [
            (tuple(key), a, p)
            for names, coefs, sketches in parts
            for key, a, p in zip(names, coefs, sketches, strict=True)
        ]
        rows.sort(key=lambda row: row[0])
        projected = np.array([p for _, _, p in rows]).reshape(len(rows), -1)
        found = reweigh(projected @ projected.T, np.array([a for _, a, _ in rows]), self._settings)
        new = {key: value for (key, _, _), value in zip(rows, found.coefficients, strict=True)}
        return found, np.array([new[tuple(key)] for key in keys])


class Sketch:
    """The projection; its signs and places are functions of the seed and the parameter, the same on every rank."""

    def __init__(self, config: Config, store: AccumulatorStore) -> None:
        settings = config.salt
        self._store, self._dimension = store, settings.sketch_dimension
        names = store.layout.names
        wanted = [i for i, name in enumerate(names) if _chosen(name, settings.sketch_layers)]
        if settings.sketch_layers and not wanted and config.learner.pipeline_parallel == 1:
            raise ConfigError(
                f"salt.sketch_layers = {list(settings.sketch_layers)}: no parameter has such a name",
                expected=f"parts of names like {names[0]}, {names[-1]}",
                remedy="name such parts, or none for all parameters",
            )
        self._maps = {i: self._map(i, config.run.seed) for i in wanted}

    def _map(self, parameter: int, seed: int) -> tuple[Tensor, Tensor]:
        """(place, sign) of every element of a parameter."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + parameter)
        count = self._store.layout.parameters[parameter].numel()
        places = torch.randint(self._dimension, (count,), generator=generator)
        signs = torch.randint(2, (count,), generator=generator, dtype=torch.int8) * 2 - 1
        return places, signs

    def project(self, keys: Sequence[AccumulatorKey], counters: WorkCounters) -> np.ndarray:
        """[n, m] float64; the error of the squared lengths goes into the counters."""
        result = torch.zeros(len(keys), self._dimension, dtype=torch.float64)
        errors = 0.0
        for row, flats in zip(result, self._store.read(keys), strict=True):
            views, length = self._store.layout.views(flats), 0.0
            for parameter, (places, signs) in self._maps.items():
                elements = views[parameter].flatten().cpu().to(torch.float64)
                row.index_add_(0, places, elements * signs)
                length += float(elements @ elements)
            errors += abs(float(row @ row) / length - 1.0) if length else 0.0
        counters.reweighed(SaltStats(sketched=len(keys), sketch_error=errors))
        return result.numpy() * self._store.unit


def _chosen(name: str, parts: Sequence[str]) -> bool:
    return not parts or any(part in name for part in parts)


def _is_own(term: FoldTerm) -> bool:
    return term.source.kind is AccumulatorKind.PER_TRAJECTORY and term.target == BATCH


def _with_coefficients(fold: Fold, new: dict[AccumulatorKey, float]) -> Fold:
    terms = tuple(t._replace(coefficient=new[t.source]) if _is_own(t) else t for t in fold.terms)
    return Fold(item=fold.item, update=fold.update, terms=terms, free=fold.free)


def _note(found: Geometry, counters: WorkCounters) -> None:
    counters.reweighed(
        SaltStats(
            geometries=1,
            cancellation=found.cancellation,
            factor=found.factor,
            rank=float(found.rank),
            spectrum=tuple(found.spectrum),
            cancellation_max=found.cancellation,
            factor_max=found.factor,
        )
    )
