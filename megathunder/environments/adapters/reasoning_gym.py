"""Procedural tasks of reasoning-gym and its own scorers: `tasks.source` and `reward.function` = "reasoning_gym".

    [tasks]                                            [tasks.options]
    source = "reasoning_gym"                           datasets = "leg_counting, basic_arithmetic"
    size = 1000                                        (other keys go to every data set: min_terms = "2")

[reward] function = "reasoning_gym" scores with the data set that made the question. The answer is what stands in the
last <answer></answer>, else in the last \\boxed{}, else the whole completion.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megathunder.config.tasks import TasksConfig
from megathunder.environments.adapters.packages import optional_package
from megathunder.errors import ConfigError
from megathunder.registry import REWARDS, TASK_SOURCES
from megathunder.tasks.boxed import last_boxed

EXTRA = "environments"
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
Row = dict[str, Any]


@TASK_SOURCES.register("reasoning_gym")
def reasoning_gym(config: TasksConfig) -> list[Row]:
    """`tasks.size` questions in all, as many of each data set."""
    package = optional_package("reasoning_gym", EXTRA)
    options = {name: _value(text) for name, text in config.options.items()}
    names = [name.strip() for name in str(options.pop("datasets", "")).split(",") if name.strip()]
    if not names:
        raise ConfigError(
            "tasks.source = 'reasoning_gym' without tasks.options.datasets",
            expected="names of data sets, separated by commas",
            remedy='[tasks.options] datasets = "leg_counting, basic_arithmetic"',
        )
    rows: list[Row] = []
    for position, name in enumerate(names):
        size = config.size // len(names) + (position < config.size % len(names))
        try:
            dataset = package.create_dataset(name, size=size, seed=config.seed, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"tasks.options.datasets names {name!r}: {error}",
                expected="a data set of reasoning-gym, and its own options",
                remedy="see reasoning_gym.factory.DATASETS for the names",
            ) from None
        rows += [
            {"prompt": entry["question"], "label": str(entry["answer"]), "kind": name, "entry": entry}
            for entry in dataset
        ]
    return rows


@REWARDS.register("reasoning_gym")
def score(completion: str, row: Row, trajectory: Any) -> float:
    """What the data set's own scorer gives the answer."""
    answers = ANSWER.findall(completion)
    answer = answers[-1].strip() if answers else last_boxed(completion) or completion.strip()
    scorer = optional_package("reasoning_gym", EXTRA).get_score_answer_fn(row["kind"])
    return float(scorer(answer, row["entry"]))


def _value(text: str) -> Any:
    """An option as the value that it is written as: "2" is a number, "a" a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
