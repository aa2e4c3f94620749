"""What an answer is worth."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config.field_types import (
    InputPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    References,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """[reward] functions that score a trajectory; without any, the task's own grader or environment decides."""

    function: References = ()
    """One or several of "file.py:name", "package.module:name" and the built-in names: score(completion, row,
    trajectory) -> float or dict of parts; score(completions, rows, trajectories) -> list is asked for batches."""
    weights: tuple[float, ...] = ()
    """Factor of each function in the sum; empty: 1 each."""
    processes: NonNegativeInt = 0
    """Processes in which synchronous functions run, ended at the time limit; 0: threads of the coordinator."""
    threads: PositiveInt = 16
    """Calls of synchronous functions at once, where `processes` is 0."""
    batch_size: PositiveInt = 64
    """Most trajectories of one call of a function that takes batches."""
    timeout_s: PositiveFloat = 60.0
    """Limit of one call; one that takes longer is a fault, not a reward of 0."""
    dry_run_s: NonNegativeFloat = 1.0
    """Limit of the call that tries each function before anything starts; 0: no such call."""
    label: str = ""
    """Column with the right answer, for the built-in functions (dots go into nested columns); empty: the first of
    label, answer, ground_truth, solution, target, reward_model.ground_truth, metadata.answer."""
    pattern: str = ""
    """Regular expression of the function `regex`; with a group, the first group must equal the label."""
    target_tokens: NonNegativeInt = 0
    """Sampled tokens up to which the function `length` gives 1; beyond, target / length."""
    json_schema: InputPath = ""
    """File with the schema that the function `json_schema` holds answers to."""
    judge_url: str = ""
    """Address of an OpenAI-compatible server for the function `judge`, up to and including /v1."""
    judge_model: str = ""
    """Model that judges."""
    judge_prompt: InputPath = ""
    """File with the judge's prompt ({prompt}, {completion}, {label} stand for the texts); empty: the built-in one."""
    judge_key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the judge's key."""
    judge_concurrency: PositiveInt = 16
    """Requests to the judge at once."""
    judge_timeout_s: PositiveFloat = 60.0
    """Limit of one request; a judge that does not answer is a fault, not a reward of 0."""
