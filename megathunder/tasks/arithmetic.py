"""Single-turn arithmetic with a verifiable answer, for models that speak a natural language.

    user       What is 3 + 2?          two questions of the kind, answered as an assistant would,
    assistant  3 + 2 = 5               in the model's own chat format
    ...
    user       What is 17 + 6?         the answer is the last box of the reply, or its last number

Kinds differ in the size of their operands: see `RANGES`. Called by tasks.source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megathunder.config import tasks
from megathunder.tasks.task import BoxedAnswer, Example, Task

KINDS = tasks.KINDS["math"]
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
RANGES = {"": (1, 9), "_30": (10, 30), "_99": (31, 99)}  # by the ending of the kind; no question has two kinds
QUESTION = "What is {left} {sign} {right}?"
ANSWER = "{left} {sign} {right} = {result}"
SHOWN = ((3, 2), (7, 4))


def arithmetic_task(rng: random.Random, task_id: str, kinds: Sequence[str]) -> Task:
    """One question of a kind drawn uniformly from `kinds`; differences are not negative."""
    kind = rng.choice(list(kinds))
    name, _, size = kind.partition("_")
    sign, (low, high) = SIGNS[name], RANGES[f"_{size}" if size else ""]
    left, right = rng.randint(low, high), rng.randint(low, high)
    if name == "minus":
        left, right = max(left, right), min(left, right)
    return Task(
        id=task_id,
        kind=kind,
        prompt=QUESTION.format(left=left, sign=sign, right=right),
        examples=tuple(shown(sign, *pair) for pair in SHOWN),
        files=(),
        grading=BoxedAnswer(answer=str(compute(sign, left, right)), or_last_number=True),
        max_turns=1,
        single_turn=True,
    )


def shown(sign: str, left: int, right: int) -> Example:
    """A question with its answer."""
    result = compute(sign, left, right)
    question, answer = (text.format(left=left, sign=sign, right=right, result=result) for text in (QUESTION, ANSWER))
    return Example(question=question, answer=answer)


def compute(sign: str, left: int, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[sign]
