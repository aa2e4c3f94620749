"""What both trainers do, in numbers. Imported in both environments, so it needs nothing but Python.

varying       lengths as they come: the policy ends a completion with probability 1 / 120 per token, at most 256 tokens
fixed         96 tokens each: the policy never ends one
multi_turn    turns end with probability 1 / 40 per token, half of them ask for a tool, at most 4 turns
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One update: `prompts` prompts with `attempts` completions each, one optimizer step."""

    name: str
    end_probability: float
    max_tokens: int
    prompts: int = 4
    attempts: int = 8
    prompt_tokens: int = 90
    learning_rate: float = 1e-6
    clip_grad: float = 1.0
    beta2: float = 0.999
    epsilon: float = 1e-4
    """Added to the sample standard deviation of a group's rewards."""
    seed: int = 7

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_workload(file: Path) -> Workload:
    """What `write` wrote."""
    return Workload(**json.loads(file.read_text()))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="varying", end_probability=1 / 120, max_tokens=256),
        Workload(name="fixed", end_probability=0.0, max_tokens=96),
    )
}
