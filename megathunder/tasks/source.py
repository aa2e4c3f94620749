"""A stream of tasks: distinct training tasks in a seeded order that wraps, and held-out tasks disjoint from them.

    split(task) = "heldout" if blake2b(content_key) mod 8 == 0 else "train"

The split depends on content alone, so it holds between any two seeds. Epoch e visits all tasks in the permutation
drawn from (seed, e). Called by loop.py and evaluation/. Refuses a batch that an unwrapped source cannot fill.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Literal, Protocol

from megathunder.config.tasks import KINDS, TasksConfig, check_kinds
from megathunder.errors import ConfigError
from megathunder.tasks import arithmetic
from megathunder.tasks.math_problems import read_problems
from megathunder.tasks.shell import shell_task
from megathunder.tasks.swe import read_repository_tasks
from megathunder.tasks.task import Task
from megathunder.tasks.terminal import read_terminal_tasks
from megathunder.types import Wire

HELDOUT_SEED = 2**31
EXHAUSTED_AFTER = 4000  # candidates in a row without a new task


class SourceState(Wire):
    """Where a source stands: `cursor` tasks of epoch `epoch` have been taken."""

    epoch: int = 0
    cursor: int = 0


class TaskSource(Protocol):
    """What loop.py needs of a stream of tasks."""

    def take(self, n: int) -> list[Task]:
        """The next n tasks; raises ConfigError if fewer are left and the source does not wrap."""

    def state(self) -> SourceState: ...

    def restore(self, state: SourceState) -> None: ...

    def heldout(self, n: int) -> list[Task]:
        """The first n held-out tasks: the same ones for every seed and at any time."""


def split(task: Task) -> Literal["train", "heldout"]:
    """The side of the split a task belongs to, by content alone."""
    digest = blake2b(task.content_key.encode(), digest_size=8).digest()
    return "heldout" if digest[0] % 8 == 0 else "train"


def distinct(candidates: Iterator[Task], side: Literal["train", "heldout"], n: int) -> list[Task]:
    """The first n candidates of one side of the split with pairwise different contents."""
    found: dict[str, Task] = {}
    misses = 0
    while len(found) < n and misses < EXHAUSTED_AFTER:
        task = next(candidates)
        misses += 1
        if split(task) == side and task.content_key not in found:
            found[task.content_key] = task
            misses = 0
    if len(found) < n:
        raise ConfigError(
            f"the chosen kinds give only {len(found)} distinct {side} tasks, and {n} were asked for",
            expected="no more tasks than there are different contents",
            remedy="lower tasks.size or tasks.heldout, or allow more tasks.kinds",
        )
    return list(found.values())


class ListedSource:
    """A TaskSource over given tasks; `heldout` are those of the other side."""

    def __init__(self, config: TasksConfig, tasks: Sequence[Task], heldout: Sequence[Task] = ()) -> None:
        if not tasks:
            raise ConfigError(
                f"{config.path or config.source} gives no task to train on",
                expected="at least one",
                remedy="see the report of tools/prepare_data.py for what was left out, and why",
            )
        self._config, self._tasks, self._heldout = config, list(tasks), list(heldout)
        self._at = SourceState()
        self._order = self._permutation(0)

    def take(self, n: int) -> list[Task]:
        left, size = len(self._tasks) - self._at.cursor, len(self._tasks)
        if n > left and not self._config.wrap:
            raise ConfigError(
                f"a batch of {n} tasks was asked for, and {left} of {size} tasks are left",
                expected="a batch no larger than the tasks that are left",
                remedy="set tasks.wrap = true, raise tasks.size, or ask for fewer groups",
            )
        taken: list[Task] = []
        while len(taken) < n:
            if self._at.cursor == size:
                self.restore(SourceState(epoch=self._at.epoch + 1))
            part = self._order[self._at.cursor : self._at.cursor + n - len(taken)]
            taken += [self._tasks[i] for i in part]
            self._at = SourceState(epoch=self._at.epoch, cursor=self._at.cursor + len(part))
        return taken

    def state(self) -> SourceState:
        return self._at

    def restore(self, state: SourceState) -> None:
        self._at, self._order = state, self._permutation(state.epoch)

    def heldout(self, n: int) -> list[Task]:
        return self._heldout[:n]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        return order


class GeneratedSource(ListedSource):
    """A TaskSource over tasks generated from numbers: candidate(seed, index, prefix of the id)."""

    def __init__(self, config: TasksConfig, candidate: Callable[[int, int, str], Task]) -> None:
        self._candidate = candidate
        super().__init__(config, distinct((candidate(config.seed, i, "train") for i in count()), "train", config.size))

    def heldout(self, n: int) -> list[Task]:
        return distinct((self._candidate(HELDOUT_SEED, i, "heldout") for i in count()), "heldout", n)


def build_source(config: TasksConfig) -> TaskSource:
    """The source that `config` names; raises ConfigError for unknown kinds, impossible sizes and unreadable files."""
    check_kinds(config)
    if (listed := given_tasks(config)) is not None:
        return ListedSource(config, *listed)
    known = KINDS[config.source]
    if config.size < 1 or (config.source == "shell" and config.max_turns < 2):
        raise ConfigError(
            f"tasks.size is {config.size} and tasks.max_turns {config.max_turns}",
            expected="at least one task, and two turns (a command and the answer)",
            remedy="raise the setting",
        )
    kinds = config.kinds or known

    def candidate(seed: int, index: int, prefix: str) -> Task:
        rng = random.Random(f"{seed}:{index}")
        name = f"{prefix}-{seed}-{index}"
        if config.source == "math":
            return arithmetic.arithmetic_task(rng, name, kinds)
        return shell_task(rng, name, kinds, config.latency_scale, config.max_turns)

    return GeneratedSource(config, candidate)


def given_tasks(config: TasksConfig) -> tuple[list[Task], list[Task]] | None:
    """(train, held-out) of a source that reads them from files; None for one that makes them up."""
    if config.source == "swe":
        return read_repository_tasks(config)
    if config.source == "terminal":
        return read_terminal_tasks(config)
    if config.source == "math" and config.path:
        problems = read_problems(Path(config.path))
        return [t for t in problems if split(t) == "train"][: config.size], [
            t for t in problems if split(t) == "heldout"
        ]
    return None


def heldout_tasks(config: TasksConfig, n: int) -> list[Task]:
    """The first n held-out tasks of a source that need not have any to train on (a benchmark)."""
    listed = given_tasks(config)
    return build_source(config).heldout(n) if listed is None else listed[1][:n]
