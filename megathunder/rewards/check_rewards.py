"""What can be wrong with [reward] before anything starts: names, signatures, settings, and one call of each function.

The call gets an empty completion, the first row of the tasks and a finished episode: whatever a policy says, a function
must give a finite number. Called before a run folder is made. Raises ConfigError.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from megathunder.config.reward import RewardConfig
from megathunder.errors import ConfigError, UserError
from megathunder.rewards.builtin_rewards import label_of, schema_validator
from megathunder.rewards.episode import FinishedEpisode, NotAScore, score_of
from megathunder.rewards.functions import NamedReward, reward_functions
from megathunder.tasks import RewardFunction, Task
from megathunder.user_code import UserCode, UserCodeFailure

LABELLED = ("exact", "boxed")


def check_rewards(config: RewardConfig, task: Task, *, decides_elsewhere: bool) -> None:
    """`task` is the first one; `decides_elsewhere`: an environment or an agent gives a reward."""
    functions = reward_functions(config)
    if not functions and isinstance(task.grading, RewardFunction) and not decides_elsewhere:
        raise ConfigError(
            "tasks of a table, and [reward] function is empty",
            expected="a function, an environment or an agent that says what an answer is worth",
            remedy='[reward] function = "rewards.py:score", or a built-in name such as "exact", "boxed" or "judge"',
        )
    for function in functions:
        if function.is_own:
            _try_own(function, config, task)
        else:
            _check_builtin(function.reference, config, task)


def _check_builtin(name: str, config: RewardConfig, task: Task) -> None:
    """Settings that the built-in function `name` needs."""
    needed = {"regex": "pattern", "length": "target_tokens", "json_schema": "json_schema"}
    needs = [needed[name]] if name in needed else ["judge_url", "judge_model"] if name == "judge" else []
    for setting in needs:
        if not getattr(config, setting):
            raise ConfigError(
                f"reward {name!r} without reward.{setting}",
                expected=f"reward.{setting}",
                remedy=f"set it: [reward] {setting} = ...",
            )
    if name == "regex":
        try:
            groups = re.compile(config.pattern).groups
        except re.error as error:
            raise ConfigError(
                f"reward.pattern = {config.pattern!r}: {error}", expected="a regular expression", remedy="correct it"
            ) from None
    if name == "json_schema":
        schema_validator(config.json_schema)
    if name in LABELLED or (name == "regex" and groups):
        try:
            label_of(task.row, config)
        except UserError as error:
            raise ConfigError(
                f"reward {name!r} on task {task.id}: {error.seen}", expected=error.expected, remedy=error.remedy
            ) from None


def _try_own(function: NamedReward, config: RewardConfig, task: Task) -> None:
    """One call of the user's function with an empty completion."""
    if not config.dry_run_s:
        return
    episode = FinishedEpisode(
        task_id=task.id,
        kind=task.kind,
        prompt=task.prompt,
        completion="",
        answer=None,
        messages=(
            *(message._asdict() for message in task.messages),
            {"role": "assistant", "content": ""},
        ),
        turns=1,
        end_reason="answered",
        sampled_tokens=1,
        environment_reward=0.0,
    )
    arguments: tuple[Any, ...] = ("", task.row, episode)
    if function.batched:
        arguments = ([""], [task.row], [episode])
    try:
        given = asyncio.run(_call(function, config, arguments))
    except UserCodeFailure as failure:
        raise ConfigError(
            f"{function}, tried with an empty completion: {failure.summary}\n{failure.details}".rstrip(),
            expected="a finite number for any completion, the empty one too",
            remedy="correct it; if it is right and slow to begin, raise reward.dry_run_s (0: no such call)",
        ) from None
    try:
        if function.batched:
            if not isinstance(given, list | tuple) and not hasattr(given, "tolist"):
                raise NotAScore(f"it gave {given!r:.80}, not a list")
            if len(given) != 1:
                raise NotAScore(f"it gave {len(given)} results for 1 completion")
            given = given[0]
        score_of(given)
    except NotAScore as wrong:
        raise ConfigError(
            f"{function}, tried with an empty completion: {wrong}",
            expected="a finite number, or a dict of finite numbers",
            remedy="return a float; for a fault raise an exception",
        ) from None


async def _call(function: NamedReward, config: RewardConfig, arguments: tuple[Any, ...]) -> Any:
    code = UserCode()
    try:
        return await code.call(
            str(function), function.function, *arguments, limit_s=config.dry_run_s, setting="reward.dry_run_s"
        )
    finally:
        code.close()
