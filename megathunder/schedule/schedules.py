"""When work may be released: the one difference between the schedules, a row each.

    schedule         a trajectory's work is released when     policy version of its tokens (lag)
    sync             the whole batch has ended                the update's (0)
    periodic_async   its whole group has ended                the update's (0)
    thundersync      at once                                  the update's (0)
    one_step_off     the whole batch has ended                one before the update's (0 or 1: a run's first batch)

"Ended" means lost, or complete and rewarded (GRPO) or scored (OPD). A schedule of one's own is a `Rule` in a file:
`schedule = "file.py:RULE"`. Called by the scheduler, the coordinator and the plan.
Refuses a token whose policy version is not one of these (StalePolicyError).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from megathunder.errors import ConfigError, StalePolicyError
from megathunder.registry import SCHEDULES


class ReleasePoint(str, Enum):
    BATCH = "batch"
    GROUP = "group"
    AT_ONCE = "at_once"


@dataclass(frozen=True, slots=True)
class Rule:
    """The release point and the lags (update's version minus token's version) that are legal. `samples_ahead`: the next
    update's rollouts run while this one is learned from."""

    name: str
    release: ReleasePoint
    lags: tuple[int, ...] = (0,)
    samples_ahead: bool = False

    def released(self, *, group_ended: bool, batch_ended: bool) -> bool:
        if self.release is ReleasePoint.AT_ONCE:
            return True
        return group_ended if self.release is ReleasePoint.GROUP else batch_ended

    @property
    def opens_groups(self) -> bool:
        """Work may be released before the weights of its group are known."""
        return self.release is ReleasePoint.AT_ONCE

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
        Rule("one_step_off", ReleasePoint.BATCH, (0, 1), samples_ahead=True),
    )
}
for _rule in RULES.values():
    SCHEDULES.register(_rule.name)(_rule)


def find_rule(name: str) -> Rule:
    """The rule of a schedule; ConfigError where there is none."""
    rule = SCHEDULES.get(name)
    if not isinstance(rule, Rule):
        raise ConfigError(
            f"schedule = {name!r} is {rule!r:.80}",
            expected="a megathunder.schedule.schedules.Rule",
            remedy="name one in your file, e.g. RULE = Rule('mine', ReleasePoint.GROUP)",
        )
    return rule
