"""Names of gradient accumulators, and the one operation between them: target += coefficient * source.

kind            group   slot
batch           -1      0                 the update's own buffer (Megatron's gradient buffer)
class           group   value index       sum of g_i over trajectories whose rewards are the value-th distinct ones
moment          group   0 .. K            0: sum g_i, k: sum r_k(i) g_i for the k-th reward
per_trajectory  group   trajectory index  g_i alone (content-ready release, SALT, weights that are a table)
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class AccumulatorKind(str, Enum):
    BATCH = "batch"
    CLASS = "class"
    MOMENT = "moment"
    PER_TRAJECTORY = "per_trajectory"


class AccumulatorKey(NamedTuple):
    """Names one gradient accumulator of a cell; see the module docstring."""

    kind: AccumulatorKind
    group: int = -1
    slot: int = 0


BATCH = AccumulatorKey(AccumulatorKind.BATCH)


class FoldTerm(NamedTuple):
    """target += coefficient * source"""

    source: AccumulatorKey
    target: AccumulatorKey
    coefficient: float
