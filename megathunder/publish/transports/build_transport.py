"""The transport that `[publish]` asks for.

transport     full weights by                        changes by
distributed   broadcast                              -
disk          folder                                 -
delta, auto   broadcast | requests | folder          group | http | folder       (publish.delta_through)

With publish.lora = "adapter" full weights are the frozen base, where a server lacks it, and the adapters come the way
of changes: by broadcast with `distributed`, through the folder with `disk`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from megathunder.config.publish import PublishConfig
from megathunder.publish.group import Pairs
from megathunder.publish.transports.adapter import AdapterTransport
from megathunder.publish.transports.automatic import AutomaticTransport
from megathunder.publish.transports.base import Transport
from megathunder.publish.transports.carriers import Carrier, FolderCarrier, GroupCarrier, HttpCarrier
from megathunder.publish.transports.delta import DeltaTransport
from megathunder.publish.transports.dense_http import FillingTransport
from megathunder.publish.transports.disk import DiskTransport
from megathunder.publish.transports.distributed import DistributedTransport

MOST_THREADS = 8


def build_transport(
    config: PublishConfig, *, device: torch.device, host: str, model: Path, folder: Path, say: Callable[[str], None]
) -> Transport:
    """`folder` holds what travels by file; `host` is where servers elsewhere reach this process."""
    ways = _Ways(config, device=device, host=host, model=model, folder=folder)
    if config.transport in ("distributed", "disk"):
        return ways.full(config.transport)
    full, carrier = ways.pair(config.delta_through)
    delta = DeltaTransport(full, carrier, threads=threads_of(config))
    return delta if config.transport == "delta" else AutomaticTransport(full, delta, say)


def build_adapter_transport(
    config: PublishConfig, *, scale: float, device: torch.device, host: str, model: Path, folder: Path
) -> AdapterTransport:
    """`scale` is that of the adapters; the rest as for `build_transport`."""
    ways = _Ways(config, device=device, host=host, model=model, folder=folder)
    full, carrier = ways.pair({"distributed": "group", "disk": "folder"}.get(config.transport, config.delta_through))
    return AdapterTransport(full, carrier, scale=scale)


def threads_of(config: PublishConfig) -> int:
    """Threads that code changes."""
    return config.encode_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)))


class _Ways:
    """Full transports and carriers of one configuration, which share process groups."""

    def __init__(self, config: PublishConfig, *, device: torch.device, host: str, model: Path, folder: Path) -> None:
        self._config, self._device, self._model, self._folder = config, device, model, folder
        backend = "nccl" if device.type == "cuda" else "gloo"
        self._pairs = Pairs(backend=backend, timeout_s=config.timeout_s, host=host)

    def full(self, name: str) -> Transport:
        bucket_bytes, checksum = self._config.bucket_mb << 20, self._config.checksum
        if name == "distributed":
            return DistributedTransport(self._pairs, bucket_bytes=bucket_bytes, checksum=checksum)
        if name == "disk":
            return DiskTransport(self._folder, self._model, checksum=checksum)
        return FillingTransport(bucket_bytes=bucket_bytes)

    def pair(self, through: str) -> tuple[Transport, Carrier]:
        """The full transport and the carrier that take the same way."""
        if through == "group":
            return self.full("distributed"), GroupCarrier(self._pairs, self._device)
        if through == "folder":
            return self.full("disk"), FolderCarrier(self._folder)
        return self.full("filling"), HttpCarrier()
