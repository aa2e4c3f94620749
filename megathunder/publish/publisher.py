"""Carries out `Publish` in the cell that holds rank 0: every rank exports its shard, rank 0 sends.

Nothing advances before all have acknowledged: the reply names the servers that did not, and the coordinator decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megathunder.config.publish import PublishConfig
from megathunder.publish.distributed import DistributedTransport
from megathunder.types import Publish, WorkStats

ExportWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Publisher:
    """`export_weights` yields (engine name, full tensor) on rank 0 and takes part in its collectives elsewhere."""

    def __init__(
        self, config: PublishConfig, *, export_weights: ExportWeights, rank: int, backend: str, host: str, api_key: str
    ) -> None:
        self._export, self._rank = export_weights, rank
        self._transport = DistributedTransport(
            backend=backend,
            bucket_bytes=config.bucket_mb << 20,
            timeout_s=config.timeout_s,
            api_key=api_key,
            host=host,
        )

    def publish(self, command: Publish) -> WorkStats:
        if self._rank != 0:
            for _ in self._export():
                pass
            return WorkStats()
        sent = self._transport.send(command.version, command.servers, self._export())
        return WorkStats(payload_bytes=sent.payload_bytes, failed_servers=tuple(sorted(sent.failed)))
