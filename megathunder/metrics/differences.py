"""How far two recorded tensor files are apart: `max |a - b| / max |a|` over the parameters of one kind.

A kind is a parameter's name without the numbers of its layer and expert, e.g. `decoder.layers.*.mlp.linear_fc1.weight`.
Called by metrics/comparison.py and tools/replay.py. Files of different parameters are infinitely far apart.
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
    """`by_kind`: largest relative difference of each kind; `identical`: every byte is equal."""

    by_kind: dict[str, float] = field(default_factory=dict)
    identical: bool = True

    @property
    def largest(self) -> float:
        return max(self.by_kind.values(), default=0.0)


def kind_of(name: str) -> str:
    """`decoder.layers.3.mlp.linear_fc1.weight` -> `decoder.layers.*.mlp.linear_fc1.weight`."""
    return NUMBERED.sub(lambda match: f"{match[1] or match[2]}.*" if match[1] else f"{match[2]}*", name)


def differences(one: Path, other: Path) -> Differences:
    """Of two safetensors files, relative to `one`."""
    first, second = load_file(one), load_file(other)
    if first.keys() != second.keys():
        missing = sorted(first.keys() ^ second.keys())
        return Differences(by_kind={name: math.inf for name in missing}, identical=False)
    gaps: dict[str, float] = defaultdict(float)
    sizes: dict[str, float] = defaultdict(float)
    for name, tensor in first.items():
        kind = kind_of(name)
        gaps[kind] = max(gaps[kind], _largest(tensor - second[name]))
        sizes[kind] = max(sizes[kind], _largest(tensor))
    same = all(tensor.tobytes() == second[name].tobytes() for name, tensor in first.items())
    return Differences(by_kind={k: _ratio(gaps[k], sizes[k]) for k in sorted(gaps)}, identical=same)


def worst(found: Iterable[Differences]) -> Differences:
    """The largest of each kind over several pairs of files."""
    by_kind: dict[str, float] = {}
    identical = True
    for one in found:
        identical &= one.identical
        for kind, value in one.by_kind.items():
            by_kind[kind] = max(by_kind.get(kind, 0.0), value)
    return Differences(by_kind=by_kind, identical=identical)


def _largest(tensor: numpy.ndarray) -> float:
    return float(numpy.abs(tensor).max()) if tensor.size else 0.0


def _ratio(gap: float, size: float) -> float:
    if math.isnan(gap):
        return math.inf
    return gap / size if size else (0.0 if gap == 0.0 else math.inf)
