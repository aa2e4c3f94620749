"""How the rollouts of an update are made where a comparison alternates that: as the settings say, or plainly.

    +plain_rollouts    servers do not draft, placement is round robin                 (group sizes: `sizing.py`)
    others             as configured

Switched when a block begins, before its first request: its warm-up pays for it. Called by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config import Config
from megathunder.config.variant import Variant, plain
from megathunder.coordinator.speculation_monitor import Drafting
from megathunder.coordinator.update_plan import Slot
from megathunder.rollout.routing import Placer, Switched, build_router
from megathunder.rollout.routing.request_router import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What there is to switch; nothing in a plain run."""

    placer: Switched | None = None
    drafting: Drafting | None = None

    @classmethod
    def of(cls, config: Config, placer: Placer, drafting: Drafting | None) -> Manners:
        """Those of a run."""
        switched = placer if isinstance(placer, Switched) else None
        return cls(placer=switched, drafting=drafting if config.run.alternate else None)

    async def enter(self, slot: Slot) -> None:
        """The rollouts of `slot` begin."""
        if not slot.first:
            return
        if self.placer is not None:
            self.placer.switch(plain=slot.variant.plain_rollouts)
        if self.drafting is not None:
            await self.drafting.begin_block(plain=slot.variant.plain_rollouts)


def build_placer(config: Config, pool: Pool) -> Placer:
    """The configured placement; where a comparison has plain rollouts, one that can be switched to theirs."""
    own = build_router(config.placement, config.rollout, pool)
    if not any(Variant.parse(name).plain_rollouts for name in config.run.alternate):
        return own
    return Switched(own, build_router(plain(config).placement, config.rollout, pool))
