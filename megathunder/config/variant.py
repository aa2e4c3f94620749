"""A schedule with what it releases, in one word: how a comparison names the things it compares.

    thundersync   thundersync/turn_forward   thundersync+content_ready   thundersync/turn_forward+content_ready

What a name leaves out is as the run's settings say. Called by the checks, the coordinator and tools.
Refuses (ConfigError) a schedule, release or addition that does not exist.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

from megathunder.config.root import Config, ScheduleName
from megathunder.config.streaming import ReleaseName
from megathunder.errors import ConfigError

SCHEDULES = typing.get_args(ScheduleName)
RELEASES = typing.get_args(ReleaseName)
CONTENT_READY = "content_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`release` is empty where the run's own counts."""

    name: str
    schedule: ScheduleName
    release: ReleaseName | None = None
    content_ready: bool = False

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant that `name` describes."""
        head, plus, addition = name.partition("+")
        schedule, slash, release = head.partition("/")
        if schedule not in SCHEDULES or (slash and release not in RELEASES) or (plus and addition != CONTENT_READY):
            raise ConfigError(
                f"no schedule is called {name!r}",
                expected=f"{', '.join(SCHEDULES)}; then perhaps /{', /'.join(RELEASES)}; then perhaps +{CONTENT_READY}",
                remedy="write it like thundersync/turn_forward or thundersync+content_ready",
            )
        return cls(
            name=name,
            schedule=typing.cast(ScheduleName, schedule),
            release=typing.cast(ReleaseName, release) if slash else None,
            content_ready=bool(plus),
        )

    def apply(self, config: Config) -> Config:
        """`config` under this schedule and release."""
        streaming = dataclasses.replace(
            config.streaming,
            release=self.release or config.streaming.release,
            content_ready=self.content_ready or config.streaming.content_ready,
        )
        return dataclasses.replace(config, schedule=self.schedule, streaming=streaming)
