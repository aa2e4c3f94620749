"""Where an update's trajectories come from: sampled by servers and agents, or fed from a recorded run (`replay.py`).

    groups(batch)                     the groups an update begins with
    replacement_group(batch, n)       group n, in the place of one whose rewards were equal; None where there is none
    collect(rollouts, groups)         emits the events of these groups into `rollouts.inbox`

Called by the coordinator.
"""

from __future__ import annotations

from typing import Protocol

from megathunder.config import Config
from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.sizing import GroupSizes
from megathunder.errors import ConfigError
from megathunder.rollout.agents.collector import Collector
from megathunder.tasks import SourceState, Task, TaskSource
from megathunder.types import ServerAddress

Groups = list[list[Task]]
REMEMBERED = 2  # batches that may have been taken and not trained on: this one and, one step ahead, the next


class Position(Protocol):
    """A place in the stream of tasks that can be saved and gone back to."""

    def position(self, batch: int) -> SourceState:
        """Where `batch` begins: the state before it was taken, if it was."""

    def restore(self, state: SourceState) -> None: ...


class Supply(Protocol):
    """See the module docstring."""

    def groups(self, batch: int) -> Groups: ...

    def replacement_group(self, batch: int, index: int) -> list[Task] | None: ...

    async def collect(self, rollouts: Rollouts, groups: range) -> None: ...

    def heldout(self) -> Groups:
        """Groups of held-out tasks."""

    async def collect_rewards(self, rollouts: Rollouts, groups: range) -> None:
        """`collect` without the teacher, for evaluation."""


class Servers(Protocol):
    """The servers that weights are published to."""

    @property
    def ready(self) -> tuple[ServerAddress, ...]: ...

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        """Those that are not lost, ready or not."""

    def probe_now(self, server: ServerAddress) -> None: ...


class SampledSupply:
    """Tasks of a source, sampled by a collector."""

    def __init__(
        self, config: Config, source: TaskSource, collector: Collector, sizes: GroupSizes | None = None
    ) -> None:
        self._config, self._source, self._collector = config, source, collector
        self._sizes = sizes or GroupSizes(config)
        self._begins: dict[int, SourceState] = {}  # of the batches taken last

    def position(self, batch: int) -> SourceState:
        return self._begins.get(batch, self._source.state())

    def restore(self, state: SourceState) -> None:
        self._source.restore(state)

    def groups(self, batch: int) -> Groups:
        self._begins = {b: state for b, state in self._begins.items() if b >= batch - REMEMBERED}
        self._begins[batch] = self._source.state()
        return self._sizes.draw(batch, self._source.take)

    def replacement_group(self, batch: int, index: int) -> list[Task] | None:
        try:
            return self._sizes.group(batch, self._source.take(1)[0])
        except ConfigError:  # a source that does not wrap is used up: the update goes on without
            return None

    async def collect(self, rollouts: Rollouts, groups: range) -> None:
        await self._collect(rollouts, groups, score=True)

    def heldout(self) -> Groups:
        tasks = self._source.heldout(self._config.tasks.heldout)
        return [[task] * self._config.run.evaluate_attempts for task in tasks]

    async def collect_rewards(self, rollouts: Rollouts, groups: range) -> None:
        await self._collect(rollouts, groups, score=False)

    async def _collect(self, rollouts: Rollouts, groups: range, *, score: bool) -> None:
        await self._collector.collect(
            rollouts.update,
            rollouts.policy_version,
            rollouts.groups[groups.start : groups.stop],
            rollouts.inbox.put_nowait,
            batch=rollouts.batch,
            first_group=groups.start,
            first_lane=sum(len(group) for group in rollouts.groups[: groups.start]),
            score=score,
        )
