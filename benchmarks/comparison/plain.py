"""A schedule beside itself with +plain_rollouts: what drafts, placement, group sizes and SALT change together.

    step wall       plain by own, one a measured update of the same prompts; above 1: own is faster
    a trajectory    the same of step wall / trajectories, since the two differ in number where group sizes follow
    recomputed      tokens of contexts that no server's prefix cache held

A plain side's servers have the plug-in loaded and do not draft; they still keep what they sample.
Trajectories differ, so gradients are not compared: each update is exact for its own (tools/replay.py checks that).
Called by `comparison.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from megathunder.config.variant import Variant
from megathunder.metrics.row import MetricsRow

Rows = Mapping[str, Sequence[MetricsRow]]


def wall_per_trajectory_s(row: MetricsRow) -> float:
    """Seconds."""
    return row.step_wall_s / row.trajectories


def sampled_tokens_per_s(row: MetricsRow) -> float:
    """Over the whole step."""
    return row.response_tokens_mean * row.trajectories / row.step_wall_s


def recomputed_tokens(row: MetricsRow) -> int | None:
    """Context tokens that were not cached; None where servers were not asked."""
    known = row.context_tokens is not None and row.cached_tokens is not None
    return row.context_tokens - row.cached_tokens if known else None


def accept_length(row: MetricsRow) -> float | None:
    """Tokens a decode step gains a request; None where servers do not draft."""
    return row.speculation_accept_length


MEASURES: dict[str, Callable[[MetricsRow], float | None]] = {
    "wall_per_trajectory_s": wall_per_trajectory_s,
    "sampled_tokens_per_s": sampled_tokens_per_s,
    "recomputed_tokens": recomputed_tokens,
    "speculation_accept_length": accept_length,
}


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """(plain, own) of every schedule that is there both ways."""
    found = [(name, Variant.parse(name)) for name in names]
    return [(name, v.with_own_rollouts) for name, v in found if v.plain_rollouts and v.with_own_rollouts in names]


def ratios(measured: Rows) -> dict[str, dict[str, list[float]]]:
    """By own schedule: `step_wall` and `wall_per_trajectory` of plain by own, in the order of the batches."""
    found = {}
    for plain, own in pairs(list(measured)):
        rows = list(zip(measured[plain], measured[own]))
        found[own] = {
            "step_wall": [a.step_wall_s / b.step_wall_s for a, b in rows],
            "wall_per_trajectory": [wall_per_trajectory_s(a) / wall_per_trajectory_s(b) for a, b in rows],
        }
    return found


def remarks(measured: Rows) -> Iterator[str]:
    """Lines for the two sides of every pair, and their ratios."""
    for plain, own in pairs(list(measured)):
        for name in (plain, own):
            yield f"{name}: {_side(measured[name])}"
        found = ratios(measured)[own]
        walls = ", ".join(f"{ratio:.2f}" for ratio in sorted(found["step_wall"]))
        yield (
            f"{plain} takes {statistics.median(found['step_wall']):.3f} of the step wall of {own} ({walls}), "
            f"{statistics.median(found['wall_per_trajectory']):.3f} of it a trajectory"
        )


def _side(rows: Sequence[MetricsRow]) -> str:
    """Medians."""
    said = [f"{statistics.median(row.trajectories for row in rows):g} trajectories"]
    texts = ("{:.3f} s each", "{:.0f} sampled tokens/s", "{:.0f} tokens recomputed", "accept length {:.2f}")
    for text, measure in zip(texts, MEASURES.values(), strict=True):
        values = [value for value in map(measure, rows) if value is not None]
        if values:
            said.append(text.format(statistics.median(values)))
    return ", ".join(said)
