"""What a person reads at the end of `bench_rollout.py placement`: medians and gains, a block an observation length."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

ORDER = ("round_robin", "least_loaded", "session", "sglang_router", "cache_aware")
SECONDS = (("wall, s; gain", "wall_s", "wall_gain"), ("server CPU, s; gain", "cpu_s", "cpu_gain"))


def placement_table(summary: Sequence[dict[str, object]], prompt_tokens: dict[int, int]) -> Table:
    """Of `summary` (placement.summarise); `prompt_tokens` are those of all agents, by observation length."""
    measured = {(line["observation_tokens"], line["policy"]): line for line in summary}
    policies = [name for name in ORDER if any(policy == name for _, policy in measured)]
    table = Table(title="medians over rounds; gains over round_robin", title_justify="left")
    for number, heading in enumerate(("observation", "", *policies)):
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=True)
    for length, total in sorted(prompt_tokens.items()):
        lines = [measured[length, policy] for policy in policies]
        for number, (heading, seconds, gain) in enumerate(SECONDS):
            table.add_row("" if number else str(length), heading, *(_with_gain(line, seconds, gain) for line in lines))
        tokens = (f"{line['computed_tokens']:,.0f}" for line in lines)
        table.add_row("", f"prompt tokens computed, of {total:,}", *tokens, end_section=True)
    return table


def _with_gain(line: dict[str, object], seconds: str, gain: str) -> str:
    base = f"{line[seconds]:.1f}"
    return base if line["policy"] == ORDER[0] else f"{base}; {line[gain]:.2f}"


def show_placement(summary: Sequence[dict[str, object]], prompt_tokens: dict[int, int]) -> None:
    """Print the table, and which policy was not measured."""
    console = Console(highlight=False)
    console.width = max(console.width, 130)  # a file has no width of its own
    console.print(placement_table(summary, prompt_tokens))
    if all(line["policy"] != "sglang_router" for line in summary):
        print(
            "sglang_router was left out, its package is not installed: pip install --no-deps -r requirements/router.txt"
        )
