"""Prompts that leave no room for an answer: counted and left out, or refused. Called when a run is assembled."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks.chat import ChatFormat
from megathunder.tasks.source import GeneratedSource, ListedSource, TaskSource
from megathunder.tasks.task import Task

log = logging.getLogger(__name__)
TEMPLATE_TOKENS = 256  # more than a chat template adds to one message
SHOWN = 3


def prompt_tokens(task: Task, chat: ChatFormat) -> list[int]:
    """What the policy reads first."""
    return chat.opening_ids(task.messages) if task.messages else chat.prompt_ids(task.prompt, *task.examples)


def fitting(source: TaskSource, config: TasksConfig, chat: ChatFormat, max_tokens: int) -> TaskSource:
    """`source` without tasks whose prompt fills `max_tokens`. Raises ConfigError where they are to be refused, or
    where nothing is left."""
    if not isinstance(source, ListedSource) or isinstance(source, GeneratedSource):
        return source
    train, heldout = (_without_long(part, config, chat, max_tokens) for part in source.parts)
    return source if (train, heldout) == source.parts else ListedSource(config, train, heldout, source.digest)


def _without_long(tasks: Sequence[Task], config: TasksConfig, chat: ChatFormat, max_tokens: int) -> list[Task]:
    lengths = {task.id: len(prompt_tokens(task, chat)) for task in tasks if _may_be_long(task, max_tokens)}
    long = {name: length for name, length in lengths.items() if length >= max_tokens}
    if not long:
        return list(tasks)
    shown = ", ".join(f"{name} ({length})" for name, length in [*long.items()][:SHOWN])
    said = f"{len(long)} of {len(tasks)} prompts have {max_tokens} tokens or more: {shown}"
    if config.overlong_prompts == "refuse" or len(long) == len(tasks):
        raise ConfigError(
            said,
            expected="prompts shorter than rollout.max_tokens",
            remedy='raise rollout.max_tokens and streaming.pack_tokens, or set tasks.overlong_prompts = "leave_out"',
        )
    log.warning("%s; left out (tasks.overlong_prompts)", said)
    return [task for task in tasks if task.id not in long]


def _may_be_long(task: Task, max_tokens: int) -> bool:
    """A token stands for at least a byte, so short texts need no tokenizer."""
    texts = [m.content for m in task.messages] or [task.prompt, *(e.question + e.answer for e in task.examples)]
    return sum(len(text.encode()) + TEMPLATE_TOKENS for text in texts) >= max_tokens
