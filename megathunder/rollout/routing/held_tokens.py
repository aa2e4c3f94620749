"""How much of a server's cache its trajectories fill, as running sums: a change costs as much as its group has members.

    held = sum over groups of [prompt + sum over members of max(0, tokens - prompt)]       a group's prompt counts once

`grown` is the same with each member at the length that is expected of it; it is made anew when expectations change.
The prompt of a group is that of its member that came first. Called by `routing_state.py`, read by the policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from megathunder.rollout.routing.request import ActiveTrajectory, GroupId, Request
from megathunder.types import TrajectoryId

Expect = Callable[[int], int]  # tokens so far -> tokens of its cache, with those it lives beside


@dataclass(slots=True)
class GroupTokens:
    """One group on one server."""

    members: dict[TrajectoryId, ActiveTrajectory] = field(default_factory=dict)
    now: int = 0
    grown: int = 0

    @property
    def prompt(self) -> int:
        return next(iter(self.members.values())).prompt_tokens if self.members else 0

    def total(self, expect: Expect | None = None) -> int:
        prompt = self.prompt
        lengths = (member.tokens if expect is None else expect(member.tokens) for member in self.members.values())
        return prompt + sum(max(0, length - prompt) for length in lengths)


class HeldTokens:
    """The sums of one server."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, GroupTokens] = {}
        self._now = self._grown = 0
        self._mean = 0.0  # of the expectation that `_grown` was made with
        self._changed: set[GroupId] = set()  # groups that `_grown` does not count

    def put(self, trajectory: TrajectoryId, known: ActiveTrajectory) -> None:
        """It is on this server from here on, or its length has changed."""
        key = (trajectory.update, trajectory.group)
        group = self._groups.setdefault(key, GroupTokens())
        group.members[trajectory] = known
        self._recount(key, group)

    def remove(self, trajectory: TrajectoryId) -> None:
        """It is no longer on this server. Idempotent."""
        key = (trajectory.update, trajectory.group)
        group = self._groups.get(key)
        if group is None or group.members.pop(trajectory, None) is None:
            return
        self._recount(key, group)
        if not group.members:
            del self._groups[key]
            self._changed.discard(key)

    def clear(self) -> None:
        self._groups.clear()
        self._changed.clear()
        self._now = self._grown = 0

    def now_with(self, more: Request) -> int:
        """With one more trajectory that brings `more`."""
        return self._now + self._beside(more, more.tokens)

    def grown_with(self, more: Request, mean: float, expect: Expect) -> int:
        """The same, each at the length that `expect` makes of its own where trajectories end at `mean` tokens."""
        if self._mean != mean:
            self._mean, self._grown = mean, 0
            self._changed = set(self._groups)
        for key in self._changed:
            self._groups[key].grown = self._groups[key].total(expect)
            self._grown += self._groups[key].grown
        self._changed.clear()
        return self._grown + self._beside(more, expect(more.tokens))

    def _beside(self, more: Request, length: int) -> int:
        group = self._groups.get(more.group)
        if group is not None:
            return max(0, length - group.prompt)
        return more.tokens + max(0, length - more.tokens)

    def _recount(self, key: GroupId, group: GroupTokens) -> None:
        self._now -= group.now
        group.now = group.total() if group.members else 0
        self._now += group.now
        if key not in self._changed:
            self._grown -= group.grown
            group.grown = 0
            self._changed.add(key)
