"""A stream of tasks: distinct training tasks in a seeded order that wraps, and held-out tasks disjoint from them.

    split(task) = "heldout" if blake2b(content_key) mod 8 == 0 else "train"

The split depends on content alone, so it holds between any two seeds. Epoch e visits all tasks in the permutation
drawn from (seed, e). Called by the coordinator and evaluation/; `build_source.py` makes one from settings. Refuses a
batch that an unwrapped source cannot fill, and a saved position in other tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import count
from typing import Literal, Protocol

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks.task import Task
from megathunder.types import Wire

HELDOUT_SEED = 2**31
EXHAUSTED_AFTER = 4000  # candidates in a row without a new task


class SourceState(Wire):
    """Where a source stands: `cursor` tasks of epoch `epoch` have been taken of `size` tasks, whose content has the
    digest `digest`; empty and 0: not known."""

    epoch: int = 0
    cursor: int = 0
    digest: str = ""
    size: int = 0


class TaskSource(Protocol):
    """What a run needs of a stream of tasks."""

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


def by_content(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """(train, held-out) of `tasks`, in their order."""
    return [t for t in tasks if split(t) == "train"], [t for t in tasks if split(t) == "heldout"]


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
    """A TaskSource over given tasks; `heldout` are those of the other side. `digest`: of the tasks that these are some
    of; empty: of these."""

    def __init__(
        self, config: TasksConfig, tasks: Sequence[Task], heldout: Sequence[Task] = (), digest: str = ""
    ) -> None:
        if not tasks:
            raise ConfigError(
                f"{config.path or config.source} gives no task to train on",
                expected="at least one",
                remedy="see what was left out and why: the held-out split, prompts that are too long, or the report of "
                "tools/prepare_data.py",
            )
        self._config, self._tasks, self._heldout = config, list(tasks), list(heldout)
        self._epoch, self._cursor, self._digest = 0, 0, digest
        self._order = self._permutation(0)

    def take(self, n: int) -> list[Task]:
        left, size = len(self._tasks) - self._cursor, len(self._tasks)
        if n > left and not self._config.wrap:
            raise ConfigError(
                f"a batch of {n} tasks was asked for, and {left} of {size} tasks are left",
                expected="a batch no larger than the tasks that are left",
                remedy="set tasks.wrap = true, raise tasks.size, or ask for fewer groups",
            )
        taken: list[Task] = []
        while len(taken) < n:
            if self._cursor == size:
                self._begin(self._epoch + 1)
            part = self._order[self._cursor : self._cursor + n - len(taken)]
            taken += [self._tasks[i] for i in part]
            self._cursor += len(part)
        return taken

    def state(self) -> SourceState:
        return SourceState(epoch=self._epoch, cursor=self._cursor, digest=self.digest, size=len(self._tasks))

    def restore(self, state: SourceState) -> None:
        """Go on at `state`. Raises ConfigError where it was saved among other tasks, unless `tasks.on_change` says to
        begin the next epoch with these."""
        changed = self.differs_from(state) or (state.size or len(self._tasks)) != len(self._tasks)
        if not changed and state.cursor <= len(self._tasks):
            self._begin(state.epoch)
            self._cursor = state.cursor
        elif self._config.on_change == "next_epoch":
            self._begin(state.epoch + 1)
        else:
            raise ConfigError(
                f"{self._config.path or self._config.source} holds {len(self._tasks)} tasks to train on, and the "
                f"checkpoint was made after {state.cursor} of {state.size or 'at least as many'} "
                f"{'others' if changed else 'tasks'}",
                expected="the same tasks: the position in them means nothing otherwise",
                remedy='restore the file, or set tasks.on_change = "next_epoch": an epoch of the new tasks begins',
            )

    def heldout(self, n: int) -> list[Task]:
        return self._heldout[:n]

    @property
    def parts(self) -> tuple[list[Task], list[Task]]:
        """All training tasks and all held-out ones."""
        return self._tasks, self._heldout

    @cached_property
    def digest(self) -> str:
        """Of the content of all training tasks, in their order."""
        if self._digest:
            return self._digest
        found = blake2b(digest_size=16)
        for task in self._tasks:
            found.update(task.digest_bytes)
        return found.hexdigest()

    def differs_from(self, state: SourceState) -> bool:
        """Whether `state` was saved among tasks of other content."""
        return bool(state.digest) and state.digest != self.digest

    def _begin(self, epoch: int) -> None:
        self._epoch, self._cursor, self._order = epoch, 0, self._permutation(epoch)

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
        return order


class GeneratedSource(ListedSource):
    """A TaskSource over tasks generated from numbers: candidate(seed, index, prefix of the id)."""

    def __init__(self, config: TasksConfig, candidate: Callable[[int, int, str], Task]) -> None:
        self._candidate = candidate
        super().__init__(config, distinct((candidate(config.seed, i, "train") for i in count()), "train", config.size))

    digest = ""  # its settings say what it holds

    def heldout(self, n: int) -> list[Task]:
        return distinct((self._candidate(HELDOUT_SEED, i, "heldout") for i in count()), "heldout", n)
