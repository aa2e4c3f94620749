"""The evaluations of one run: `evaluations.jsonl`, one line per evaluation. Written by the coordinator."""

from __future__ import annotations

from pathlib import Path

import msgspec

from megathunder.evaluation.estimate import Estimate, Score
from megathunder.jsonl import append_line, decoded_lines, encode_lines
from megathunder.metrics.run_folder import write_atomically


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The policy after `updates` updates, and what it had cost. A line of `evaluations.jsonl`."""

    updates: int
    policy_version: int
    device_hours: float
    score: Score

    def pass_at(self, k: int) -> Estimate | None:
        """None where too few attempts were made."""
        found = (row.over_all for row in self.score.pass_at if row.k == k and row.over_all.value is not None)
        return next(found, None)


def append_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Add a line."""
    append_line(path, evaluation)


def read_evaluations(path: Path) -> tuple[Evaluation, ...]:
    """Every whole line, ordered by updates; of two for one update the later. Raises UserError for a damaged one."""
    lines = decoded_lines(path, msgspec.json.Decoder(Evaluation))
    found = {evaluation.updates: evaluation for _, evaluation in lines}
    return tuple(found[updates] for updates in sorted(found))


def forget_evaluations(path: Path, after: int) -> None:
    """Drop those of policies with more than `after` updates: they will be made again."""
    if path.exists():
        write_atomically(path, encode_lines(e for e in read_evaluations(path) if e.updates <= after))
