"""Ready chains by the reason they may run, each lane in order of readiness.

    lane              holds                                             runs on
    direct, cell      backward with a known weight; cached turns        that cell
    direct, -1        backward with a known weight                      any cell
    group, g          backward into accumulators of open group g        the group's cell
    own, g            content-ready backward, reward unknown            the group's cell
    forward, cell/-1  forward of finished turns                         that cell / any

Called by the dispatcher, which decides the order among lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

from megathunder.schedule.state import Chain, Lane

ANY = -1


class Lanes:
    """Ordered sets of chains; a chain is in at most one lane."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, dict[Chain, None]] = {}

    def put(self, chain: Chain, lane: Lane | None) -> None:
        """Move `chain` to `lane`, or out of all lanes. A chain that stays in its lane keeps its place."""
        if chain.lane == lane:
            return
        if chain.lane is not None:
            old = self._lanes[chain.lane]
            del old[chain]
            if not old:
                del self._lanes[chain.lane]
        chain.lane = lane
        if lane is not None:
            self._lanes.setdefault(lane, {})[chain] = None

    def chains(self, lane: Lane) -> list[Chain]:
        return list(self._lanes.get(lane, ()))

    def first(self, lane: Lane) -> Chain | None:
        return next(iter(self._lanes.get(lane, ())), None)

    def indices(self, kind: str) -> Iterator[int]:
        """Groups (or cells) that have something in a lane of this kind, longest waiting lane first."""
        return (index for k, index in list(self._lanes) if k == kind)

    def count(self, kinds: tuple[str, ...]) -> int:
        """Chains in all lanes of these kinds."""
        return sum(len(chains) for (kind, _), chains in self._lanes.items() if kind in kinds)

    def __bool__(self) -> bool:
        return bool(self._lanes)
