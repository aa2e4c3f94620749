"""What a change costs at least, and naively: the yardsticks of the coding.

bound = N h(p) + n H(v)      bits: positions and values taken as independent draws
  N elements, n of them changed, p = n / N, h the binary entropy, H(v) the entropy of the differences in ulps
naive = n (4 + bytes of an element)      a four-byte index and the new value
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def entropy_bound_bytes(elements: int, differences: Iterable[np.ndarray]) -> float:
    """`differences`: the nonzero differences, modulo the word, of every tensor."""
    changed, counts = 0, {}
    for difference in differences:
        for value, count in zip(*np.unique(difference, return_counts=True), strict=True):
            counts[int(value)] = counts.get(int(value), 0) + int(count)
        changed += difference.size
    if changed in (0, elements):
        positions = 0.0
    else:
        share = changed / elements
        positions = -elements * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    shares = np.array(list(counts.values()), dtype=np.float64) / max(changed, 1)
    return float(positions - changed * (shares * np.log2(shares)).sum()) / 8


def naive_bytes(changed: int, element_bytes: int) -> int:
    """Index and value of each changed element."""
    return changed * (4 + element_bytes)
