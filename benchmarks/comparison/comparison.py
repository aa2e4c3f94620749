"""Schedules compared on the same work, from the rows and gradients of one run that alternated them in blocks.

    measured          updates of a block after its warm-up
    speed-up          per round: step walls of sync by step walls of the schedule, on the same batches
    predicted         the same, simulated from the recorded updates of sync (given by the tool), with and without what
                      rollout and learner cost each other at once
    verifier hidden   1 - (T - T0) / verifier_s, T0 the wall of the variant without the verifier
    gradient diff     per batch: max |g - g_sync| by max |g_sync|, of the worst kind of parameter, before the clip; of
                      batches whose gradient is not 0 under both

Called by tools/compare.py. Refuses a run in which a schedule has no measured update.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.comparison.alternation import alternation_of, tensor_file
from benchmarks.comparison.differences import Differences, differences
from megathunder.errors import UserError
from megathunder.metrics.row import MetricsRow, read_rows
from megathunder.metrics.run_folder import RunFolder
from megathunder.simulator.variant import Variant

TIMES = ("step_wall_s", "rollout_s", "tail_s", "suffix_s", "learner_busy_share")
OTHERS = (
    "active_mfu",
    "wasted_share",
    "learner_idle_s",
    "learner_blocked_s",
    "open_groups_peak",
    "accumulator_bytes_peak",
    "host_memory_bytes",
    "policy_lag_max",
    "engine_learner_logprob_diff_max",
    "trained_tokens",
    "total_tokens",
    "trajectories",
    "context_tokens",
    "cached_tokens",
    "speculation_drafted_tokens",
    "speculation_accepted_tokens",
    "speculation_off_share",
)
BASE = "sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measured rows by schedule, in the order of their batches; `differences` against the base schedule's gradient,
    which is 0 in `zero_updates` of its measured updates; `predicted` simulated speed-ups over the base, where there are
    any, `predicted_alone` those without `interference` (factors on the time of rollout and of learner work by
    schedule)."""

    measured: dict[str, list[MetricsRow]]
    differences: dict[str, float]
    base: str
    warmup: int
    zero_updates: int = 0
    verifier_s: float = 0.0
    predicted: dict[str, float] = field(default_factory=dict)
    predicted_alone: dict[str, float] = field(default_factory=dict)
    interference: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def walls(self) -> dict[str, list[float]]:
        """Seconds of each measured step."""
        return {name: [row.step_wall_s for row in rows] for name, rows in self.measured.items()}

    def speedups(self, schedule: str) -> list[float]:
        """Step wall of the base by that of `schedule`, one a measured update."""
        return [base / own for base, own in zip(self.walls[self.base], self.walls[schedule])]

    def speedup(self, schedule: str) -> float:
        """Their median."""
        return statistics.median(self.speedups(schedule))

    @property
    def prediction_errors(self) -> dict[str, float]:
        """|predicted - measured| / measured speed-up."""
        return {n: abs(p - self.speedup(n)) / self.speedup(n) for n, p in self.predicted.items() if n != self.base}

    @property
    def tail_ratios(self) -> dict[str, list[float]]:
        """Tail of each schedule by that of the base, one a measured update."""
        base = self.measured[self.base]
        return {
            name: [own.tail_s / other.tail_s for own, other in zip(rows, base) if other.tail_s]
            for name, rows in self.measured.items()
            if name != self.base
        }

    @property
    def verifier_hidden(self) -> dict[str, list[float]]:
        """Share of the verifier's delay that does not lengthen the step; needs a variant without the verifier."""
        plain = next((n for n in self.walls if Variant.parse(n).without_verifier), None)
        if plain is None or not self.verifier_s:
            return {}
        return {
            name: [1.0 - (own - free) / self.verifier_s for own, free in zip(walls, self.walls[plain])]
            for name, walls in self.walls.items()
            if name != plain
        }

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
            "base": self.base,
            f"speedup_vs_{self.base}": speedups,
            f"predicted_speedup_vs_{self.base}": self.predicted,
            f"predicted_speedup_vs_{self.base}_without_interference": self.predicted_alone,
            "interference_factors": self.interference,
            "prediction_error": self.prediction_errors,
            f"tail_ratio_vs_{self.base}": {name: summary(values) for name, values in self.tail_ratios.items()},
            "verifier_s": self.verifier_s,
            "verifier_hidden": {name: summary(values) for name, values in self.verifier_hidden.items()},
            "warmup_updates_a_block": self.warmup,
            "updates_without_gradient": self.zero_updates,
        }

    def rows(self) -> list[list[str]]:
        """Cells of the table: schedule, step, speed-up, predicted, rollout, tail, suffix, busy, lag, gradient
        difference."""
        lines = []
        for name, rows in self.measured.items():
            median = {field: statistics.median(getattr(row, field) for row in rows) for field in TIMES}
            difference = self.differences.get(name)
            lines.append(
                [
                    name,
                    f"{statistics.median(self.walls[name]):.2f}",
                    f"{self.speedup(name):.3f}",
                    f"{self.predicted[name]:.3f}" if name in self.predicted else "-",
                    f"{median['rollout_s']:.2f}",
                    f"{median['tail_s']:.3f}",
                    f"{median['suffix_s']:.3f}",
                    f"{median['learner_busy_share']:.0%}",
                    str(max(row.policy_lag_max for row in rows)),
                    "-" if difference is None else f"{difference:.1e}",
                ]
            )
        return lines

    def remarks(self) -> Iterator[str]:
        """What the table has no column for."""
        if self.zero_updates:
            yield (
                f"gradients of {self.zero_updates} of {len(self.measured[self.base])} measured updates are 0 (no group "
                "had different rewards): of these nothing was compared"
            )
        for name, error in self.prediction_errors.items():
            yield f"{name}: measured speed-up differs from the predicted one by {error:.1%}"
            rollout, learner = (self.interference.get(part, {}).get(name, 1.0) for part in ("rollout", "learner"))
            yield f"{name}: rollout and learner slow each other down by {rollout - 1:.1%} and {learner - 1:.1%}"
        for name, ratios in self.tail_ratios.items():
            if ratios:
                yield f"{name}: tail {statistics.median(ratios):.3f} of that of {self.base}"
        for name, shares in self.verifier_hidden.items():
            yield f"{name}: hides {statistics.median(shares):.0%} of a verifier of {self.verifier_s:g} s"


def summary(values: Sequence[float | None]) -> dict[str, object]:
    """Median and all values; None where nothing was measured."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return {"median": statistics.median(known) if known else None, "runs": list(values)}


def compare(folder: RunFolder, schedules: Sequence[str], *, warmup: int, block: int) -> Comparison:
    """Read what a comparison run wrote; of one that was stopped, the rounds that every schedule has finished."""
    rows = [row for row in read_rows(folder.metrics) if row.update % block >= warmup]
    measured = {name: [row for row in rows if row.schedule == name] for name in schedules}
    empty = [name for name, found in measured.items() if not found]
    if empty:
        raise UserError(
            f"{folder.path} has no measured update of {', '.join(empty)}",
            expected="a comparison run in which every schedule has ended a block",
            remedy="run tools/compare.py again; its output says why the run ended early",
        )
    rounds = min(map(len, measured.values()))
    measured = {name: found[:rounds] for name, found in measured.items()}
    recording = alternation_of(folder.path).recording
    base = BASE if BASE in measured else schedules[0]
    files = {name: [_gradient(folder, row.update) for row in measured[name]] for name in schedules}
    pairs = {name: _compared(files[base], files[name]) for name in schedules if all(files[base] + files[name])}
    return Comparison(
        measured=measured,
        differences={name: max(pair.largest for pair in found) for name, found in pairs.items() if found},
        base=base,
        warmup=warmup,
        zero_updates=len(files[base]) - len(pairs[base]) if base in pairs else 0,
        verifier_s=recording.verifier_s if recording else 0.0,
    )


def _gradient(folder: RunFolder, update: int) -> Path | None:
    file = tensor_file(folder.path, "gradients", update)
    return file if file.is_file() else None


def _compared(ones: Sequence[Path | None], others: Sequence[Path | None]) -> list[Differences]:
    """Of each pair of files, but for those that are 0 in both."""
    pairs = (differences(a, b) for a, b in zip(ones, others) if a is not None and b is not None)
    return [pair for pair in pairs if pair.by_kind]
