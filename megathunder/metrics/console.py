"""What a person sees while a run runs: two bars (rollout, learner) that move, and one line an update that stays.

On a terminal the bars are live; elsewhere, or with `--run.progress false`, only the lines are printed. Called by
`monitor.py`; draws from numbers it is given and holds no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megathunder.metrics.row import MetricsRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the run stands. Trajectories and contributions are of the current update."""

    update: int
    updates: int
    phase: str
    """What it is busy with: rollout, tail, step, publish, evaluate."""
    elapsed_s: float
    """Since the update's first request."""
    trajectories_done: int = 0
    trajectories: int = 0
    contributions_done: int = 0
    contributions: int = 0
    reward_mean: float | None = None
    """Of the rewards so far."""


class Console:
    """The display of one run; `live` draws bars."""

    def __init__(self, *, live: bool, file: TextIO | None = None) -> None:
        self._console = RichConsole(file=file, highlight=False)
        self._last: MetricsRow | None = None
        self._live: Live | None = None
        if live and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def print(self, renderable: object) -> None:
        """Print something that stays: the plan, a note, a restart."""
        self._console.print(renderable, soft_wrap=isinstance(renderable, str))  # a path can be copied

    def refresh(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(draw(progress, self._last))

    def row(self, row: MetricsRow) -> None:
        self._last = row
        self._console.print(Text(line(row), overflow="ignore", no_wrap=True), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def line(row: MetricsRow) -> str:
    """One update in one line."""
    heldout = "" if row.success_heldout is None else f" (held-out {row.success_heldout:.3f})"
    reasons = ", ".join(f"{reason.replace('_', ' ')} {number}" for reason, number in row.dropped_by_reason.items())
    dropped = f" dropped {row.contributions_dropped} ({reasons})" if row.contributions_dropped else ""
    step = "" if row.stepped else f" NO STEP: {row.skip_reason}"
    return (
        f"update {row.update:4d}  reward {row.reward_mean:.3f}{heldout}  step {row.step_wall_s:.2f} s = rollout "
        f"{row.rollout_s:.2f} + tail {row.tail_s:.2f} + suffix {row.suffix_s:.2f}  learner busy "
        f"{row.learner_busy_share:.0%}  lag {row.policy_lag_max}  mismatch {row.engine_learner_logprob_diff_max:.1e}"
        f"  applied {row.contributions_applied}{dropped}{step}"
    )


def draw(progress: Progress, last: MetricsRow | None) -> Group:
    """The live part: a bar a side, what it is busy with, and the last update."""
    bars = Table.grid(padding=(0, 1))
    for name, done, total, colour in (
        ("run", progress.update, progress.updates, "white"),
        ("rollout", progress.trajectories_done, progress.trajectories, "dark_orange"),
        ("learner", progress.contributions_done, progress.contributions, "dodger_blue1"),
    ):
        bar = ProgressBar(total=max(total, 1), completed=done, width=36, complete_style=colour, finished_style=colour)
        bars.add_row(Text(name, style="bold"), bar, f"{done}/{total}", _beside(name, progress, last))
    return Group(bars)


def _beside(name: str, progress: Progress, last: MetricsRow | None) -> str:
    if name == "run":
        return f"update {progress.update}: {progress.phase}, {progress.elapsed_s:.1f} s"
    if name == "rollout":
        return "" if progress.reward_mean is None else f"reward so far {progress.reward_mean:.3f}"
    if last is None:
        return ""
    return f"last: reward {last.reward_mean:.3f}, step {last.step_wall_s:.2f} s, tail {last.tail_s:.2f} s"
