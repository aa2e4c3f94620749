"""A schedule with what it releases, in one word: how predictions and comparisons name what they compare.

    thundersync   thundersync/turn_forward   thundersync+content_ready   thundersync/turn_forward+content_ready
    thundersync+no_verifier      a replay without the verifier's delay that the others have

What a name leaves out is as the run's settings say. Called by predictions and
comparisons.
Refuses (ConfigError) a schedule, release or addition that does not exist.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.config.streaming import ReleaseName
from megathunder.errors import ConfigError
from megathunder.schedule.schedules import RULES

SCHEDULES = tuple(RULES)
RELEASES = typing.get_args(ReleaseName)
CONTENT_READY, NO_VERIFIER = ADDITIONS = ("content_ready", "no_verifier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """`release` is empty where the run's own counts."""

    name: str
    schedule: str
    release: ReleaseName | None = None
    additions: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, name: str) -> Variant:
        """The variant that `name` describes."""
        head, *additions = name.split("+")
        schedule, slash, release = head.partition("/")
        if schedule not in SCHEDULES or (slash and release not in RELEASES) or not set(additions) <= set(ADDITIONS):
            raise ConfigError(
                f"no schedule is called {name!r}",
                expected=f"{', '.join(SCHEDULES)}; then perhaps /{', /'.join(RELEASES)}; +{', +'.join(ADDITIONS)}",
                remedy="write it like thundersync/turn_forward or thundersync+content_ready",
            )
        return cls(
            name=name,
            schedule=schedule,
            release=typing.cast(ReleaseName, release) if slash else None,
            additions=frozenset(additions),
        )

    @property
    def without_verifier(self) -> bool:
        return NO_VERIFIER in self.additions

    def apply(self, config: Config) -> Config:
        """`config` under this schedule and release."""
        streaming = dataclasses.replace(
            config.streaming,
            release=self.release or config.streaming.release,
            content_ready=CONTENT_READY in self.additions or config.streaming.content_ready,
        )
        return dataclasses.replace(config, schedule=self.schedule, streaming=streaming)
