"""How far two recorded tensor files are apart, by kind of parameter.

    by_kind    max |a - b| / max |a|
    by_norm    ||a - b|| / ||a||      for weights: Adam divides by |g|, so where a gradient is smaller than its own
                                      rounding a single weight may move by up to a step size, whichever sum is right

A kind is a parameter's name without the numbers of its layer and expert, e.g. `decoder.layers.*.mlp.linear_fc1.weight`.
Kinds that are 0 in both files are left out: that two zeros are equal says nothing of how they were reckoned.
Called by benchmarks/comparison/comparison.py and tools/replay.py. Files of different parameters are infinitely
far apart.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
from safetensors.numpy import load_file

NUMBERED = re.compile(r"(layers|experts|local_experts)\.\d+\b|(weight|bias)\d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Relative differences of each kind, of the largest element and of norms; `identical`: every byte is equal. No kind
    at all: both are 0 everywhere, and nothing was compared."""

    by_kind: dict[str, float] = field(default_factory=dict)
    by_norm: dict[str, float] = field(default_factory=dict)
    identical: bool = True

    @property
    def largest(self) -> float:
        return max(self.by_kind.values(), default=0.0)

    @property
    def largest_norm(self) -> float:
        return max(self.by_norm.values(), default=0.0)


def kind_of(name: str) -> str:
    """`decoder.layers.3.mlp.linear_fc1.weight` -> `decoder.layers.*.mlp.linear_fc1.weight`."""
    return NUMBERED.sub(lambda match: f"{match[1] or match[2]}.*" if match[1] else f"{match[2]}*", name)


def differences(one: Path, other: Path) -> Differences:
    """Of two safetensors files, relative to `one`."""
    first, second = load_file(one), load_file(other)
    if first.keys() != second.keys():
        missing = sorted(first.keys() ^ second.keys())
        apart = {name: math.inf for name in missing}
        return Differences(by_kind=apart, by_norm=apart, identical=False)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sorted(first):
        kinds[kind_of(name)].append(name)
    by_kind, by_norm = {}, {}
    for kind, names in kinds.items():
        whole = numpy.concatenate([first[name].ravel() for name in names]).astype(numpy.float64)
        gap = whole - numpy.concatenate([second[name].ravel() for name in names])
        if not whole.any() and not gap.any():
            continue
        by_kind[kind] = _ratio(numpy.abs(gap).max(initial=0.0), numpy.abs(whole).max(initial=0.0))
        by_norm[kind] = _ratio(numpy.linalg.norm(gap), numpy.linalg.norm(whole))
    same = all(tensor.tobytes() == second[name].tobytes() for name, tensor in first.items())
    return Differences(by_kind=by_kind, by_norm=by_norm, identical=same)


def worst(found: Iterable[Differences]) -> Differences:
    """The largest of each kind over several pairs of files."""
    pairs = list(found)
    return Differences(
        by_kind=_maxima([pair.by_kind for pair in pairs]),
        by_norm=_maxima([pair.by_norm for pair in pairs]),
        identical=all(pair.identical for pair in pairs),
    )


def _maxima(tables: list[dict[str, float]]) -> dict[str, float]:
    kinds = sorted({kind for table in tables for kind in table})
    return {kind: max(table.get(kind, 0.0) for table in tables) for kind in kinds}


def _ratio(gap: float, size: float) -> float:
    gap, size = float(gap), float(size)
    if math.isnan(gap):
        return math.inf
    return gap / size if size else math.inf
