"""Whether curves may be compared: every policy is scored on the same held-out tasks, under the same sampling settings.

    evaluated now       the tasks themselves
    recorded by a run   ids and kinds of the tasks in its evaluations, and the settings that their content depends on

Called by tools/evaluate.py before it starts anything. Refuses the first score that is of something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from megathunder.config import Config
from megathunder.config.tasks import KINDS
from megathunder.errors import ConfigError
from megathunder.evaluation.attempts import LIMITS
from megathunder.evaluation.history import Evaluation
from megathunder.tasks import Task

SAMPLING_SETTINGS = ("rollout.temperature", *(f"rollout.{name}" for name in LIMITS))
OF_TASKS = ("tasks.source", "tasks.path", "tasks.kinds", "tasks.heldout", "tasks.latency_scale", "tasks.max_turns")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreBasis:
    """What one score is a score of; `tasks` has a mark for each, equal where the task is."""

    name: str
    config: Config
    tasks: frozenset[str]


def planned_basis(name: str, config: Config, tasks: Sequence[Task]) -> ScoreBasis:
    """`tasks`, about to be evaluated with the settings `config`."""
    marks = (blake2b(task.digest_bytes, digest_size=16).hexdigest() for task in tasks)
    return ScoreBasis(name=name, config=config, tasks=frozenset(marks))


def recorded_basis(name: str, config: Config, evaluation: Evaluation) -> ScoreBasis:
    """What a run with the settings `config` evaluated itself. Ids of repositories and terminal tasks are their names;
    those of other tasks are numbers, which mean the same only with the same settings."""
    tasks = config.tasks
    told: list[object] = [tasks.source, tasks.max_turns]
    if tasks.source in KINDS:
        told += [tasks.path, tasks.kinds or KINDS[tasks.source], tasks.latency_scale]
    return ScoreBasis(
        name=f"{name} after {evaluation.updates} updates",
        config=config,
        tasks=frozenset(f"{told} {result.kind} {result.task_id}" for result in evaluation.score.by_task),
    )


def require_comparable(scores: Sequence[ScoreBasis], *, remedy: str) -> None:
    """Raise ConfigError unless all `scores` are of the same."""
    for other in scores[1:]:
        first, same = scores[0], scores[0].tasks == other.tasks
        settings = [
            f"{name} = {before!r} and {after!r}"
            for name in (SAMPLING_SETTINGS if same else OF_TASKS + SAMPLING_SETTINGS)
            if (before := setting_of(first.config, name)) != (after := setting_of(other.config, name))
        ]
        if same and not settings:
            continue
        counts = f"{len(first.tasks)} and {len(other.tasks)} held-out tasks"
        shared = "all" if same else len(first.tasks & other.tasks)
        raise ConfigError(
            f"{first.name} and {other.name}: {'; '.join([f'{counts}, {shared} of them the same', *settings])}",
            expected="the same tasks under the same sampling settings: other scores say nothing of each other",
            remedy=remedy,
        )


def setting_of(config: Config, name: str) -> object:
    """The value of `section.key`."""
    section, _, key = name.partition(".")
    return getattr(getattr(config, section), key)
