"""Problems of mathematics from a file: single-turn tasks whose answer is a box.

    {"problem": "What is half of 3?", "answer": "\\\\frac{3}{2}"}      one a line, or rows of a JSON or Parquet file

The split is by content (`tasks.source.split`), so that a problem is on one side whatever file it comes from. Called by
tasks.source. Refuses rows without the two fields.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megathunder.errors import ConfigError
from megathunder.tasks.row_files import raw_rows
from megathunder.tasks.task import BoxedAnswer, Task

PROMPT = "{problem}\n\nReason step by step, and put the final answer in \\boxed{{}}."


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Further fields are ignored."""

    problem: str
    answer: str


def read_problems(path: Path) -> list[Task]:
    """Every problem of a file, in its order; of equal ones the first. Raises ConfigError naming the first bad row."""
    found: dict[str, Task] = {}
    for number, row in enumerate(raw_rows(path)):
        try:
            problem = msgspec.convert(row, Problem)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path}, row {number}: {error}",
                expected='{"problem": "...", "answer": "..."}, both texts',
                remedy="mend the row, or leave it out",
            ) from None
        task = Task(
            id=f"{path.stem}-{number}",
            kind="problem",
            prompt=PROMPT.format(problem=problem.problem.strip()),
            files=(),
            grading=BoxedAnswer(answer=problem.answer),
            max_turns=1,
            single_turn=True,
        )
        found.setdefault(task.content_key, task)
    return list(found.values())
