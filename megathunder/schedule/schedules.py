"""When work may be released: the one difference between the schedules.

    schedule         a trajectory's work is released when     policy version of its tokens (lag)
    sync             the whole batch has ended                the update's (0)
    periodic_async   its whole group has ended                the update's (0)
    thundersync      at once                                  the update's (0)
    one_step_off     the whole batch has ended                one before the update's (0 or 1: a run's first batch)

"Ended" means lost, or complete and rewarded (GRPO) or scored (OPD). Called by the scheduler.
Refuses a token whose policy version is not one of these (StalePolicyError).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megathunder.errors import StalePolicyError


class ReleasePoint(str, Enum):
    BATCH = "batch"
    GROUP = "group"
    AT_ONCE = "at_once"


@dataclass(frozen=True, slots=True)
class Rule:
    """The release point and the lags (update's version minus token's version) that are legal."""

    name: str
    release: ReleasePoint
    lags: tuple[int, ...] = (0,)

    def released(self, *, group_ended: bool, batch_ended: bool) -> bool:
        if self.release is ReleasePoint.AT_ONCE:
            return True
        return group_ended if self.release is ReleasePoint.GROUP else batch_ended

    def lag(self, token_version: int, update_version: int) -> int:
        """Lag of a token; StalePolicyError where this schedule does not train on it."""
        lag = update_version - token_version
        if lag not in self.lags:
            raise StalePolicyError(
                f"a token of policy version {token_version} reached an update at version {update_version}\n"
                f"  expected: lag {' or '.join(map(str, self.lags))} under schedule {self.name!r}\n"
                "  remedy:   start rollouts only after every server has acknowledged the version of the update"
            )
        return lag


RULES = {
    rule.name: rule
    for rule in (
        Rule("sync", ReleasePoint.BATCH),
        Rule("periodic_async", ReleasePoint.GROUP),
        Rule("thundersync", ReleasePoint.AT_ONCE),
        Rule("one_step_off", ReleasePoint.BATCH, (0, 1)),
    )
}
