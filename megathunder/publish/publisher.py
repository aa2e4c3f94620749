"""Carries out `Publish` in the cell that holds rank 0: every rank exports its shard, rank 0 sends.

    every server: known version, idle, cache empty -> transport -> version and checksum acknowledged -> update closed

Nothing advances before all have acknowledged: the reply names the servers that did not, and the coordinator decides.
Weights are published in the type the servers compute in.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from megathunder.config.root import Config
from megathunder.publish.bits import FLOATS, published_dtype
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Transport
from megathunder.publish.transports.build_transport import build_adapter_transport, build_transport
from megathunder.types import Publish, WorkStats

ExportWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Publisher:
    """`export_weights` yields (Hugging Face name, full tensor) on rank 0, takes part in its collectives elsewhere. With
    `export_base` it yields adapters (PEFT's names), and `export_base` the frozen weights, asked for once."""

    def __init__(
        self,
        config: Config,
        *,
        export_weights: ExportWeights,
        rank: int,
        device: torch.device,
        host: str,
        folder: Path,
        export_base: ExportWeights | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._export, self._export_base, self._rank = export_weights, export_base, rank
        self._adapters = export_base is not None  # merged, and then rounded, by the servers
        self._dtype = FLOATS.get(config.rollout.dtype)
        self._api_key, self._timeout_s = config.rollout.api_key, config.publish.timeout_s
        self._transport = transport or _transport(
            config,
            adapters=self._adapters,
            device=device,
            host=host,
            folder=Path(config.publish.folder) / config.run.name if config.publish.folder else folder / "published",
        )

    def publish(self, command: Publish) -> WorkStats:
        """Send the current weights to the command's servers as its version."""
        base, self._export_base = self._export_base, None
        if self._rank != 0:
            for _ in itertools.chain(base() if base else (), self._export()):
                pass
            return WorkStats()
        if base:
            self._transport.hold_base(base(), self._dtype)
        with PublishSession(command.servers, api_key=self._api_key, timeout_s=self._timeout_s) as round:
            round.each(round.open_update, command.servers)
            sent = self._transport.send(round, command.servers, command.version, self._weights())
            round.each(round.close_update, command.servers)
            return WorkStats(payload_bytes=sent, failed_servers=tuple(sorted(round.failed)))

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._export():
            yield name, tensor if self._adapters else tensor.to(published_dtype(name, self._dtype) or tensor.dtype)


def _transport(config: Config, *, adapters: bool, device: torch.device, host: str, folder: Path) -> Transport:
    model, learner = Path(config.learner.model), config.learner
    if adapters:
        scale = learner.lora_alpha / learner.lora_rank
        return build_adapter_transport(
            config.publish, scale=scale, device=device, host=host, model=model, folder=folder
        )

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return build_transport(config.publish, device=device, host=host, model=model, folder=folder, say=say)
