"""Tables that a person reads. Called by tools/evaluate.py and `runs.py`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from megathunder.evaluation import Score
from megathunder.evaluation.cost_comparison import Comparison
from megathunder.evaluation.estimate import Estimate


def show_comparison(comparison: Comparison, unit: str) -> None:
    """A row a run."""
    title = f"pass@{comparison.k}: {unit} to {comparison.target:.1%}, score within {comparison.budget_hours:.4g}"
    table = Table(title=title)
    for heading in ("run", "schedule", f"{unit} to target", "updates", "at budget", "updates"):
        table.add_column(heading)
    for run in comparison.runs:
        hours = "not reached" if run.hours_to_target is None else f"{run.hours_to_target:.4g}"
        value = "nothing yet" if run.at_budget is None else f"{run.at_budget:.1%}"
        counts = ["–" if n is None else str(n) for n in (run.updates_to_target, run.updates_at_budget)]
        table.add_row(run.run, run.schedule, hours, counts[0], value, counts[1])
    Console(highlight=False).print(table)


def show(result: Score) -> None:
    """The table of one policy."""
    console, table = Console(highlight=False), Table(title=f"{result.tasks} tasks, {result.sent} attempts")
    for heading in ("", "over all", "over completed"):
        table.add_column(heading)
    over_completed = result.accuracy_over_completed
    table.add_row(
        "accuracy", f"{result.accuracy_over_all:.1%}", "–" if over_completed is None else f"{over_completed:.1%}"
    )
    for row in result.pass_at:
        table.add_row(f"pass@{row.k}", in_words(row.over_all), in_words(row.over_completed))
    console.print(table)
    lost = result.sent - result.completed
    if lost:
        console.print(f"{lost} attempts were lost by the machinery: wrong on the left, not counted on the right")


def in_words(estimate: Estimate) -> str:
    """`41.2 % [33.0, 50.1] of 64 tasks`"""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.value:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}] of {estimate.tasks} tasks"
