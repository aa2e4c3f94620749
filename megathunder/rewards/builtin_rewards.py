"""Reward functions by name, for [reward] function.

    exact          the completion equals the label
    boxed          the last \\boxed{} of the completion equals the label as mathematics
    regex          reward.pattern is found; its group, if any, equals the label
    length         1 up to reward.target_tokens sampled tokens, less beyond
    json_schema    the completion is JSON that fits reward.json_schema
    code           share of the row's tests that pass in a sandbox              (code_tests.py)
    judge          another model's number between 0 and 1                       (judge.py)
    task           the grader that the task names; program, repository, terminal: the same, for tasks of that kind
    environment    what the environment or the agent gave

The label is the column reward.label, or the first of the usual names that the row has. Called by scorer.py.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from megathunder.config.reward import RewardConfig
from megathunder.errors import ConfigError, UserError
from megathunder.registry import REWARDS
from megathunder.rewards.episode import FinishedEpisode
from megathunder.rewards.functions import RewardContext
from megathunder.tasks import ProgramCheck, RepositoryTests, TerminalTests
from megathunder.tasks.boxed import boxed_reward

LABELS = ("label", "answer", "ground_truth", "solution", "target", "reward_model.ground_truth", "metadata.answer")
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
FINAL = "####"  # before the answer of a worked solution (GSM8K)
Row = dict[str, Any]


def label_of(row: Row, settings: RewardConfig) -> str:
    """The right answer in `row`. Raises UserError where no column has one."""
    for name in (settings.label,) if settings.label else LABELS:
        value: Any = row
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return str(value).rpartition(FINAL)[2].strip()
    raise UserError(
        f"the row has no {settings.label or 'label'}; its columns are {', '.join(row) or 'none'}",
        expected=f"a column {settings.label or ', '.join(LABELS)}",
        remedy='name it: [reward] label = "the column" (dots go into nested columns)',
    )


@REWARDS.register("exact")
def exact(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """1 if the completion without blanks around it is the label, else 0."""
    return float(completion.strip() == label_of(row, context.settings))


@REWARDS.register("boxed")
def boxed(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """1 if the last \\boxed{} of the completion equals the label mathematically, else 0."""
    return boxed_reward(completion, label_of(row, context.settings))


@REWARDS.register("regex")
def regex(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """1 if the pattern is found in the completion, and its last match's first group, if any, is the label."""
    matches = [*re.finditer(context.settings.pattern, completion, re.DOTALL)]
    if not matches or not matches[-1].re.groups:
        return float(bool(matches))
    return float((matches[-1].group(1) or "").strip() == label_of(row, context.settings))


@REWARDS.register("length")
def length(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """min(1, target / sampled tokens)."""
    return min(1.0, context.settings.target_tokens / max(1, trajectory.sampled_tokens))


@REWARDS.register("json_schema")
def json_schema(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """1 if the completion, or its last fenced block, is JSON that the schema accepts, else 0."""
    fenced = FENCED.findall(completion)
    try:
        value = json.loads(fenced[-1] if fenced else completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(schema_validator(context.settings.json_schema).is_valid(value))


@REWARDS.register("task")
async def task(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """What the grader of the task says."""
    return await context.grade_task()


def _graded_by(name: str, kind: type) -> None:
    async def graded(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
        if not isinstance(context.task.grading, kind):
            raise UserError(
                f"reward {name!r} on task {context.task.id}, which is graded by {type(context.task.grading).__name__}",
                expected=f"tasks with {kind.__name__}",
                remedy='name the reward "task", which asks whatever grader a task has',
            )
        return await context.grade_task()

    REWARDS.register(name)(graded)


_graded_by("program", ProgramCheck)
_graded_by("repository", RepositoryTests)
_graded_by("terminal", TerminalTests)


@REWARDS.register("environment")
def environment(completion: str, row: Row, trajectory: FinishedEpisode, *, context: RewardContext) -> float:
    """The sum that the environment gave, or what the agent returned."""
    if trajectory.environment_reward is None:
        raise UserError(
            f"reward 'environment' on task {trajectory.task_id}, to which no environment and no agent gave a reward",
            expected="tasks.environment, or an agent that returns a number",
            remedy="set tasks.environment, or remove the name from reward.function",
        )
    return trajectory.environment_reward


@cache
def schema_validator(path: str) -> Any:
    """The validator of the schema in a file. Raises ConfigError."""
    import jsonschema  # needed for this reward only

    try:
        schema = json.loads(Path(path).read_text())
        kind = jsonschema.validators.validator_for(schema)
        kind.check_schema(schema)
    except (OSError, ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(
            f"reward.json_schema = {path!r}: {str(error).splitlines()[0]}",
            expected="a file with a JSON schema",
            remedy="correct the file",
        ) from None
    return kind(schema)
