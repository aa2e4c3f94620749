"""One update's rollouts as the loop sees them: an inbox of events, and the task that fills it.

    Collector --emit--> inbox <-- Done of the learner       `messages` empties it, oldest first

Called by `loop.py` and `coordinator.py`. A collector that fails puts its error in the inbox, so that the loop, which
waits nowhere else, raises it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Awaitable, Callable

import msgspec

from megathunder.errors import InfrastructureFailure
from megathunder.tasks import Task
from megathunder.types import (
    Done,
    Event,
    Rewarded,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnScored,
)

Message = Event | Done


class Stopped(Exception):
    """The run was asked to end while these rollouts were under way."""


def cause_of(reason: str) -> str:
    """A reason without what differs from one trajectory to the next: numbers, paths."""
    return re.sub(r"/\S+|\d+", "*", reason)


Collect = Callable[["Rollouts", range], Awaitable[None]]  # of which groups


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Rollouts:
    """Groups of tasks sampled under one policy version. `groups[b][i]` is the task of trajectory i of group b; groups
    may be added while it runs."""

    update: int
    batch: int  # which prompts and sampling seeds
    policy_version: int
    groups: list[list[Task]]
    started_s: float = dataclasses.field(default_factory=time.monotonic)
    last_reward_at_s: float = 0.0  # last reward or teacher score: from here on only the learner is late
    trajectories: dict[TrajectoryId, Trajectory] = dataclasses.field(default_factory=dict)
    lost: dict[TrajectoryId, str] = dataclasses.field(default_factory=dict)
    inbox: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    _tasks: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)

    def start(self, collect: Collect) -> Rollouts:
        """Begin sampling; returns itself."""
        self._tasks.append(asyncio.create_task(self._run(collect, range(len(self.groups)))))
        return self

    def add_group(self, tasks: list[Task], collect: Collect) -> None:
        """Sample one more group beside those that run."""
        self.groups.append(tasks)
        self._tasks.append(asyncio.create_task(self._run(collect, range(len(self.groups) - 1, len(self.groups)))))

    async def _run(self, collect: Collect, groups: range) -> None:
        try:
            await collect(self, groups)
        except Exception as error:
            self.inbox.put_nowait(error)
        finally:
            self.inbox.put_nowait(None)

    async def messages(self, timeout_s: float) -> list[Message]:
        """What has come in, waiting for something (None wakes without a message).

        Raises what a worker or the collector raised, and InfrastructureFailure after `timeout_s` of silence."""
        try:
            async with asyncio.timeout(timeout_s):  # unlike wait_for, it never swallows a cancellation
                found = [await self.inbox.get()]
        except TimeoutError:
            raise InfrastructureFailure(
                f"update {self.update} made no progress for {timeout_s:.0f} s: {len(self.trajectories)} of "
                f"{self.expected} trajectories complete, {len(self.lost)} lost (limit: streaming.stall_timeout_s)"
            ) from None
        while not self.inbox.empty():
            found.append(self.inbox.get_nowait())
        for message in found:
            if isinstance(message, Exception):
                raise message
        return [message for message in found if message is not None]

    @property
    def expected(self) -> int:
        return sum(len(group) for group in self.groups)

    def record(self, event: Event) -> None:
        """Keep what the records of the run need of `event`."""
        if isinstance(event, TrajectoryCompleted):
            self.trajectories[event.trajectory.id] = event.trajectory
        elif isinstance(event, Rewarded):
            known = self.trajectories[event.id]
            self.trajectories[event.id] = msgspec.structs.replace(
                known, reward=event.reward, reward_parts=event.parts, rewarded_s=event.at_s
            )
        elif isinstance(event, TrajectoryLost):
            self.lost[event.id] = event.reason
            self.trajectories.pop(event.id, None)
            self._check_all_lost()
        if isinstance(event, Rewarded | TurnScored | TrajectoryLost):
            self.last_reward_at_s = max(self.last_reward_at_s, event.at_s)

    def _check_all_lost(self) -> None:
        """Raises InfrastructureFailure where every trajectory was lost for one reason: the next update would be too."""
        if len(self.lost) < self.expected or len({cause_of(reason) for reason in self.lost.values()}) > 1:
            return
        first = next(iter(self.lost.values()))
        raise InfrastructureFailure(f"{len(self.lost)} of {self.expected} trajectories lost: {first}")

    @property
    def drained(self) -> bool:
        """No event is outstanding: graders may go on after the last contribution is weighed (distillation, replaced
        groups)."""
        return not self.running and self.inbox.empty()

    async def ended(self) -> None:
        """Wait until no trajectory of these is in flight any more."""
        while running := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(running)

    @property
    def running(self) -> bool:
        return not all(task.done() for task in self._tasks)

    def cancel(self) -> None:
        """Stop sampling; `ended` tells when it has. Used when the run ends early."""
        for task in self._tasks:
            task.cancel()
