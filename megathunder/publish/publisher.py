"""Carries out `Publish` in the cell that holds rank 0: every rank exports its shard, rank 0 sends.

    every server: known version, idle, cache empty -> transport -> version and checksum acknowledged -> update closed

Nothing advances before all have acknowledged: the reply names the servers that did not, and the coordinator decides.
Weights are published in the type the servers compute in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from megathunder.config.root import Config
from megathunder.publish.round import Round
from megathunder.publish.transports.base import Transport
from megathunder.publish.transports.build import build_transport
from megathunder.publish.words import FLOATS
from megathunder.types import Publish, WorkStats

ExportWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
STAYS_FLOAT32 = "e_score_correction_bias"  # the router's bias, in engines as in checkpoints


class Publisher:
    """`export_weights` yields (Hugging Face name, full tensor) on rank 0, takes part in its collectives elsewhere."""

    def __init__(
        self,
        config: Config,
        *,
        export_weights: ExportWeights,
        rank: int,
        device: torch.device,
        host: str,
        folder: Path,
        transport: Transport | None = None,
    ) -> None:
        self._export, self._rank = export_weights, rank
        self._dtype = FLOATS.get(config.rollout.dtype)
        self._api_key, self._timeout_s = config.rollout.api_key, config.publish.timeout_s
        self._transport = transport or build_transport(
            config.publish,
            device=device,
            host=host,
            model=Path(config.learner.model),
            folder=Path(config.publish.folder) if config.publish.folder else folder / "published",
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )

    def publish(self, command: Publish) -> WorkStats:
        """Send the current weights to the command's servers as its version."""
        if self._rank != 0:
            for _ in self._export():
                pass
            return WorkStats()
        with Round(command.servers, api_key=self._api_key, timeout_s=self._timeout_s) as round:
            round.each(round.open_update, command.servers)
            sent = self._transport.send(round, command.servers, command.version, self._weights())
            round.each(round.close_update, command.servers)
            return WorkStats(payload_bytes=sent, failed_servers=tuple(sorted(round.failed)))

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._export():
            cast = self._dtype is not None and not name.endswith(STAYS_FLOAT32)
            yield name, tensor.to(self._dtype) if cast else tensor
