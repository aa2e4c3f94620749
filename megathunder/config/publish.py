"""How new weights reach the rollout servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishConfig:
    """[publish] transport of the weights after a step."""

    transport: Literal["distributed"] = "distributed"
    """`distributed`: broadcast from learner rank 0 over a process group per server (gloo on CPU, nccl on GPU)."""
    bucket_mb: int = 64
    """Weights sent in one call."""
    timeout_s: float = 120.0
    """Limit of one publication."""
    min_servers: int = 1
    """The run goes on while this many servers hold the current version."""
