"""How new weights reach the rollout servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import NonNegativeInt, OutputPath, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """[publish] transport of the weights after a step."""

    transport: Literal["distributed", "delta", "disk", "auto"] = "distributed"
    """`distributed`: broadcast from learner rank 0 over a process group per server (gloo on CPU, nccl on GPU). `delta`:
    only what changed, bit for bit. `disk`: a folder that servers can read. `auto`: measures full weights, then changes,
    and keeps the faster."""
    delta_through: Literal["group", "http", "folder"] = "group"
    """What carries changes (delta, auto): the servers' process groups, the requests themselves, or a shared folder."""
    folder: OutputPath = ""
    """Folder that learner and servers share (disk, folder), where each run has one of its own by its name; empty:
    `published` in the run's folder."""
    lora: Literal["merged", "adapter"] = "merged"
    """What travels when adapters are trained: the merged weights, or the adapters alone, which the servers merge into a
    base they keep (host memory for a copy of the adapted weights on each server)."""
    checksum: bool = True
    """Every server must acknowledge a checksum of the weights it holds. Off: for servers without our weight loader."""
    bucket_mb: PositiveInt = 64
    """Weights sent in one call; two buckets are in memory at once."""
    encode_threads: NonNegativeInt = 0
    """Threads that compare and code changes (delta, auto); 0: one for each core of the learner's, at most 8."""
    timeout_s: PositiveFloat = 120.0
    """Limit of one step of a publication: a bucket, an answer."""
    min_servers: PositiveInt = 1
    """The run goes on while this many servers hold the current version."""
