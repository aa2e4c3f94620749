"""The transport that `[publish]` asks for.

transport     full weights by                        changes by
distributed   broadcast                              -
disk          folder                                 -
delta, auto   broadcast | requests | folder          group | http | folder       (publish.delta_through)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megathunder.config.publish import PublishConfig
from megathunder.publish.group import Pairs
from megathunder.publish.transports.automatic import AutomaticTransport
from megathunder.publish.transports.base import Transport
from megathunder.publish.transports.delta import DeltaTransport, FolderCarrier, GroupCarrier, HttpCarrier
from megathunder.publish.transports.disk import DiskTransport
from megathunder.publish.transports.distributed import DistributedTransport
from megathunder.publish.transports.filling import FillingTransport


def build_transport(
    config: PublishConfig, *, device: torch.device, host: str, model: Path, folder: Path, say: Callable[[str], None]
) -> Transport:
    """`folder` holds what travels by file; `host` is where servers elsewhere reach this process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    pairs = Pairs(backend=backend, timeout_s=config.timeout_s, host=host)
    bucket_bytes = config.bucket_mb << 20
    distributed = DistributedTransport(pairs, bucket_bytes=bucket_bytes, checksum=config.checksum)
    disk = DiskTransport(folder, model, checksum=config.checksum)
    if config.transport == "distributed":
        return distributed
    if config.transport == "disk":
        return disk
    full, carrier = {
        "group": (distributed, GroupCarrier(pairs, device)),
        "http": (FillingTransport(bucket_bytes=bucket_bytes), HttpCarrier()),
        "folder": (disk, FolderCarrier(folder)),
    }[config.delta_through]
    delta = DeltaTransport(full, carrier)
    return delta if config.transport == "delta" else AutomaticTransport(full, delta, say)
