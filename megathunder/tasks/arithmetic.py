"""Single-turn arithmetic with a boxed answer: a verifiable reward for models that speak a natural language.

    "Compute. 3 + 2 gives \\boxed{5}. ... What gives 17 + 26? Reply with the box only."        \\boxed{43}

Operands are drawn so that a small instruction-tuned model is right sometimes. Called by tasks.source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megathunder.config import tasks
from megathunder.tasks.task import BoxedAnswer, Task

KINDS = tasks.KINDS["math"]
PROMPT = (
    "Compute. 3 {sign} 2 gives \\boxed{{{first}}}. 7 {sign} 4 gives \\boxed{{{second}}}. "
    "What gives {left} {sign} {right}? Reply with the box only."
)
EXAMPLES = {"plus": (5, 11), "minus": (1, 3), "times": (6, 28)}


def arithmetic_task(rng: random.Random, task_id: str, kinds: Sequence[str]) -> Task:
    """One question of a kind drawn uniformly from `kinds`."""
    kind = rng.choice(list(kinds))
    left, right = rng.randint(2, 30), rng.randint(2, 30)
    sign, result = {"plus": ("+", left + right), "minus": ("-", left - right), "times": ("*", left * right)}[kind]
    first, second = EXAMPLES[kind]
    prompt = PROMPT.format(left=left, sign=sign, right=right, first=first, second=second)
    return Task(id=task_id, kind=kind, prompt=prompt, files=(), grading=BoxedAnswer(answer=str(result)), max_turns=1)
