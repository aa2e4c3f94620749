"""Schedules compared on the same work, from the rows and gradients of one run that alternated them in blocks.

    measured          updates of a block after its warm-up
    speed-up          per round: step walls of sync by step walls of the schedule, on the same batches
    gradient diff     per batch: max |g - g_sync| by max |g_sync|, of the worst kind of parameter, before the clip

Called by tools/compare.py. Refuses a run in which a schedule has no measured update.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megathunder.errors import UserError
from megathunder.metrics.differences import differences
from megathunder.metrics.folder import RunFolder
from megathunder.metrics.row import MetricsRow, read_rows

TIMES = ("step_wall_s", "rollout_s", "tail_s", "suffix_s", "learner_busy_share")
OTHERS = (
    "active_mfu",
    "wasted_share",
    "accumulator_bytes_peak",
    "host_memory_bytes",
    "policy_lag_max",
    "engine_learner_logprob_diff_max",
    "trained_tokens",
    "total_tokens",
    "trajectories",
)
BASE = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measured rows by schedule, in the order of their batches; `differences` against the base schedule's gradient."""

    measured: dict[str, list[MetricsRow]]
    differences: dict[str, float]
    base: str
    warmup: int

    def speedups(self, schedule: str) -> list[float]:
        """Step wall of the base by that of `schedule`, one a measured update."""
        pairs = zip(self.measured[self.base], self.measured[schedule])
        return [base.step_wall_s / row.step_wall_s for base, row in pairs]

    def as_table(self) -> dict[str, object]:
        """Everything, as JSON: medians and all runs."""
        schedules = {}
        for name, rows in self.measured.items():
            entry: dict[str, object] = {field: summary([getattr(r, field) for r in rows]) for field in TIMES + OTHERS}
            entry["policy_lag_max"] = max(row.policy_lag_max for row in rows)
            entry["tail_share"] = summary([row.tail_s / row.step_wall_s for row in rows])
            entry["update_max_rel_diff_vs_sync"] = self.differences.get(name)
            schedules[name] = entry
        speedups = {name: summary(self.speedups(name)) for name in self.measured if name != self.base}
        return {
            "schedules": schedules,
            f"speedup_vs_{BASE}" if self.base == BASE else f"speedup_vs_{self.base}": speedups,
            "warmup_updates_a_block": self.warmup,
        }

    def rows(self) -> list[list[str]]:
        """Cells of the table: schedule, step, speed-up, rollout, tail, suffix, busy, lag, gradient difference."""
        lines = []
        for name, rows in self.measured.items():
            median = {field: statistics.median(getattr(row, field) for row in rows) for field in TIMES}
            difference = self.differences.get(name)
            lines.append(
                [
                    name,
                    f"{median['step_wall_s']:.2f}",
                    f"{statistics.median(self.speedups(name)):.3f}",
                    f"{median['rollout_s']:.2f}",
                    f"{median['tail_s']:.3f}",
                    f"{median['suffix_s']:.3f}",
                    f"{median['learner_busy_share']:.0%}",
                    str(max(row.policy_lag_max for row in rows)),
                    "-" if difference is None else f"{difference:.1e}",
                ]
            )
        return lines


def summary(values: Sequence[float | None]) -> dict[str, object]:
    """Median and all values; None where nothing was measured."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return {"median": statistics.median(known) if known else None, "runs": list(values)}


def compare(folder: RunFolder, schedules: Sequence[str], *, warmup: int, block: int) -> Comparison:
    """Read what a comparison run wrote."""
    rows = [row for row in read_rows(folder.metrics) if row.update % block >= warmup]
    measured = {name: [row for row in rows if row.schedule == name] for name in schedules}
    empty = [name for name, found in measured.items() if not found]
    if empty:
        raise UserError(
            f"{folder.path} has no measured update of {', '.join(empty)}",
            expected="a finished comparison run",
            remedy="run tools/compare.py again; its output says why the run ended early",
        )
    base = BASE if BASE in measured else schedules[0]
    files = {name: [_gradient(folder, row.update) for row in found] for name, found in measured.items()}
    differences = {name: _largest(files[base], files[name]) for name in schedules if all(files[base] + files[name])}
    return Comparison(measured=measured, differences=differences, base=base, warmup=warmup)


def _gradient(folder: RunFolder, update: int) -> Path | None:
    file = folder.tensors_of("gradients", update)
    return file if file.is_file() else None


def _largest(ones: Sequence[Path | None], others: Sequence[Path | None]) -> float:
    pairs = [(a, b) for a, b in zip(ones, others) if a is not None and b is not None]
    return max(differences(a, b).largest for a, b in pairs)
