"""Ready chains by the reason they may run, each queue in order of readiness.

    queue              holds                                             runs on
    direct, cell       backward with a known weight; cached turns        that cell
    direct, -1         backward with a known weight                      any cell
    group, g           backward into accumulators of open group g        the group's cell
    content_ready, g   the same with the reward unknown                  the group's cell
    forward, cell/-1   forward of finished turns                         that cell / any

Part of `UpdateState`; `next_work.py` decides the order among queues.
"""

from __future__ import annotations

from collections.abc import Iterator

from megathunder.schedule.state import Chain, QueueKey

ANY = -1


class ReadyQueues:
    """Ordered sets of chains; a chain is in at most one queue."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, dict[Chain, None]] = {}

    def move(self, chain: Chain, queue: QueueKey | None) -> None:
        """Move `chain` to `queue`, or out of all queues. A chain that stays in its queue keeps its place."""
        if chain.queue == queue:
            return
        if chain.queue is not None:
            old = self._queues[chain.queue]
            del old[chain]
            if not old:
                del self._queues[chain.queue]
        chain.queue = queue
        if queue is not None:
            self._queues.setdefault(queue, {})[chain] = None

    def chains(self, queue: QueueKey) -> list[Chain]:
        return list(self._queues.get(queue, ()))

    def first(self, queue: QueueKey) -> Chain | None:
        return next(iter(self._queues.get(queue, ())), None)

    def indices(self, kind: str) -> Iterator[int]:
        """Groups (or cells) that have something in a queue of this kind, longest waiting queue first."""
        return (index for k, index in list(self._queues) if k == kind)

    def count(self, kinds: tuple[str, ...]) -> int:
        """Chains in all queues of these kinds."""
        return sum(len(chains) for (kind, _), chains in self._queues.items() if kind in kinds)

    def __bool__(self) -> bool:
        return bool(self._queues)
