"""What routing knows of a request and of a trajectory: lengths, counts and identities, no text and no time."""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.types import TrajectoryId

GroupId = tuple[int, int]  # update, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One turn that wants a server. `tokens`: its context, [T]. A policy version has a cache of its own: what another
    version computed is flushed."""

    trajectory: TrajectoryId
    tokens: int
    version: int = 0
    serial: int = 0  # order of arrival

    @property
    def group(self) -> GroupId:
        return (self.trajectory.update, self.trajectory.group)


@dataclass(slots=True)
class ActiveTrajectory:
    """A trajectory between its first request and its end."""

    prompt_tokens: int
    tokens: int  # of its context so far
    affinity: str  # the server of its turns; "" for none
    version: int
    turns: int = 0

    @property
    def started(self) -> bool:
        """Whether a turn of it has been computed, so that its server's cache holds a prefix of it."""
        return self.turns > 0
