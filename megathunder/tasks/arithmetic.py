"""Single-turn arithmetic with a boxed answer: a verifiable reward for models that speak a natural language.

    "What is 17 + 26? Think briefly, then give the result as \\boxed{...}."        43

Operands are drawn so that a small instruction-tuned model is right sometimes. Called by tasks.source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megathunder.tasks.task import BoxedAnswer, Task

KINDS = ("plus", "minus", "times")
PROMPT = "What is {left} {sign} {right}? Answer with the result as \\boxed{{result}}, for example \\boxed{{12}}."


def arithmetic_task(rng: random.Random, task_id: str, kinds: Sequence[str]) -> Task:
    """One question of a kind drawn uniformly from `kinds`."""
    kind = rng.choice(list(kinds))
    left, right = rng.randint(2, 99), rng.randint(2, 99)
    if kind == "times":
        left, right = rng.randint(2, 12), rng.randint(2, 12)
    sign, result = {"plus": ("+", left + right), "minus": ("-", left - right), "times": ("*", left * right)}[kind]
    prompt = PROMPT.format(left=left, sign=sign, right=right)
    return Task(id=task_id, kind=kind, prompt=prompt, files=(), grading=BoxedAnswer(answer=str(result)), max_turns=1)
