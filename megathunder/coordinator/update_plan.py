"""Which schedule an update runs under and which batch of prompts it takes: the plain run, or a comparison in blocks.

    plain run      update u: config.schedule, batch u
    comparison     schedules A, B; blocks of n:   A A B B | B B A A | ...    each round on the same n batches

In a comparison a schedule that samples ahead does so to the end of its block, as it would for ever; what was sampled
for a block of another schedule is thrown away.

Rounds alternate their order, so that a drift of the machine falls on both schedules alike. Called by the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass

from megathunder.config import Config
from megathunder.config.variant import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What update `update` does. `first` opens a block: nothing sampled before belongs to it. `last` ends the run."""

    update: int
    variant: Variant
    batch: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Agenda:
    """The slots of a run."""

    config: Config

    def slot(self, update: int) -> Slot:
        """The slot of `update`, 0-based."""
        run = self.config.run
        names, size = run.alternate, run.alternate_block
        if not names:
            last = update + 1 >= run.updates
            own = Variant(name=self.config.schedule, schedule=self.config.schedule)
            return Slot(update=update, variant=own, batch=update, first=update == 0, last=last)
        block, within = divmod(update, size)
        round_, turn = divmod(block, len(names))
        order = names if round_ % 2 == 0 else names[::-1]
        return Slot(
            update=update,
            variant=Variant.parse(order[turn]),
            batch=round_ * size + within,
            first=within == 0,
            last=False,
        )
