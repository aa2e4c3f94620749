"""The task source that `tasks.source` names: a built-in one, or the user's own function.

    table                    rows of prompts at tasks.path                         (tasks.table)
    shell, math              generated from the seed
    seeds                    rows with a seed alone, for environments that need no more
    swe, terminal            read from files at tasks.path
    "file.py:load"           def load(path, config, **options), with those of these that it takes -> rows (dict, as in a
                             table), tasks, or an object with take, state, restore and heldout

Called by the coordinator, evaluation/ and the checks before a run. Raises ConfigError.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megathunder.config.tasks import KINDS, TasksConfig, check_kinds
from megathunder.errors import ConfigError
from megathunder.registry import TASK_SOURCES
from megathunder.tasks import arithmetic
from megathunder.tasks.math_problems import read_problems
from megathunder.tasks.row_files import unicode_error
from megathunder.tasks.shell import shell_task
from megathunder.tasks.source import GeneratedSource, ListedSource, TaskSource, by_content
from megathunder.tasks.swe import read_repository_tasks
from megathunder.tasks.table import read_table, table_tasks
from megathunder.tasks.task import Task
from megathunder.tasks.terminal import read_terminal_tasks

Split = tuple[list[Task], list[Task]]  # train, held-out


def build_source(config: TasksConfig) -> TaskSource:
    """The source that `config` names; raises ConfigError for unknown kinds, impossible sizes and unreadable files."""
    check_kinds(config)
    made = _call(TASK_SOURCES.get(config.source), config)
    return made if hasattr(made, "take") else ListedSource(config, *_split(made, config))


def heldout_tasks(config: TasksConfig, n: int) -> list[Task]:
    """The first n held-out tasks of a source that need not have any to train on (a benchmark)."""
    check_kinds(config)
    made = _call(TASK_SOURCES.get(config.source), config)
    return made.heldout(n) if hasattr(made, "take") else _split(made, config)[1][:n]


@TASK_SOURCES.register("table")
def table(config: TasksConfig) -> Split:
    """Rows of prompts; without a column, a file or a split of held-out rows a digest of the prompt divides them."""
    train, heldout = read_table(config)
    if heldout or config.heldout_path or config.heldout_split or not config.heldout:
        return train, heldout
    return by_content(train)


@TASK_SOURCES.register("math")
def math(config: TasksConfig) -> Split | GeneratedSource:
    """Problems with answers at `config.path`; without a path they are generated."""
    if not config.path:
        return generated(config)
    train, heldout = by_content(read_problems(Path(config.path)))
    return train[: config.size], heldout


@TASK_SOURCES.register("seeds")
def seeds(config: TasksConfig) -> list[dict[str, int]]:
    """Rows of nothing but a seed, for an environment that makes its own episodes."""
    return [{"seed": config.seed * config.size + number} for number in range(config.size)]


TASK_SOURCES.register("swe")(read_repository_tasks)
TASK_SOURCES.register("terminal")(read_terminal_tasks)


@TASK_SOURCES.register("shell")
def generated(config: TasksConfig) -> GeneratedSource:
    """Tasks of chosen kinds, drawn from the seed."""
    if config.size < 1 or (config.source == "shell" and config.max_turns < 2):
        raise ConfigError(
            f"tasks.size is {config.size} and tasks.max_turns {config.max_turns}",
            expected="at least one task, and two turns (a command and the answer)",
            remedy="raise the setting",
        )
    kinds = config.kinds or KINDS[config.source]

    def candidate(seed: int, index: int, prefix: str) -> Task:
        rng = random.Random(f"{seed}:{index}")
        name = f"{prefix}-{seed}-{index}"
        if config.source == "math":
            return arithmetic.arithmetic_task(rng, name, kinds)
        return shell_task(rng, name, kinds, config.latency_scale, config.max_turns)

    return GeneratedSource(config, candidate)


def _call(load: Callable[..., object], config: TasksConfig) -> object:
    """`load` with those of path, config and tasks.options that its signature has."""
    if not callable(load):
        raise ConfigError(
            f"task source {config.source!r} is {load!r:.80}",
            expected="a function that gives rows, tasks or a task source",
            remedy="name the function",
        )
    offered = {"path": config.path, "config": config, **config.options}
    parameters = inspect.signature(load).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters}
    unknown = [name for name in config.options if ":" in config.source and name not in named and not takes_any]
    unfilled = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in offered
    ]
    if unknown or unfilled:
        raise ConfigError(
            f"task source {config.source!r} takes ({', '.join(named)}); tasks.options has "
            f"{', '.join(config.options) or 'nothing'}",
            expected="parameters among path, config and the names in [tasks.options]",
            remedy=f"set tasks.options.{unfilled[0]}" if unfilled else f"remove tasks.options.{unknown[0]}",
        )
    try:
        made = load(**{name: value for name, value in offered.items() if name in named or takes_any})
        return list(made) if isinstance(made, Iterator) else made  # a generator runs here
    except (ConfigError, OSError):
        raise
    except (Exception, SystemExit) as error:  # the user's own code
        raise ConfigError(
            f"task source {config.source!r} raised {type(error).__name__}: {error}",
            expected="rows, tasks or a task source",
            remedy="correct the function; called alone it shows the whole traceback",
        ) from error


def _split(made: object, config: TasksConfig) -> Split:
    """(train, held-out) of what a source gave."""
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, list) for part in made):
        return made
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise ConfigError(
            f"task source {config.source!r} gave {type(made).__name__}",
            expected="an iterable of rows (dict) or tasks, or an object with take, state, restore and heldout",
            remedy="return a list",
        )
    given = list(made)
    for number, one in enumerate(given):
        if error := unicode_error(one, f"task source {config.source!r}, row {number}"):
            raise error
    tasks = (
        given if given and all(isinstance(one, Task) for one in given) else table_tasks(given, config, config.source)
    )
    return by_content(tasks) if config.heldout else (tasks, [])
