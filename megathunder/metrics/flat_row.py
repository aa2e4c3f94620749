"""A row as one flat table, as trackers want it: nested tables are joined by "/".

    {"by_kind": {"sum": {"reward_mean": 0.5}}, "tokens_by_lag": {0: 7}, "loss": None}
    -> {"by_kind/sum/reward_mean": 0.5, "tokens_by_lag/0": 7}

What was not measured (None) is left out. Called by the sinks.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megathunder.metrics.row import MetricsRow

Value = bool | int | float | str


def flat_row(row: MetricsRow) -> dict[str, Value]:
    """Every value of `row` by its name. A size's `posterior` is the mean of it, as `sizing/risk/<size>`."""
    table = msgspec.to_builtins(row)
    if sizing := table.get("sizing"):
        posterior = sizing.pop("posterior") or {}
        sizing["risk"] = {size: alpha / (alpha + beta) for size, (alpha, beta) in posterior.items()}
    return dict(_flat("", table))


def flat_numbers(row: MetricsRow) -> dict[str, float]:
    """The same without text; true is 1."""
    return {name: float(value) for name, value in flat_row(row).items() if not isinstance(value, str)}


def _flat(prefix: str, value: object) -> Iterator[tuple[str, Value]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}/{key}" if prefix else str(key), inner)
    elif isinstance(value, list | tuple):
        yield from _flat(prefix, dict(enumerate(value)))
    elif value is not None:
        yield prefix, value  # type: ignore[misc]
