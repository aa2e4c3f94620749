"""The pool that the settings ask for: of this machine, or of others. Called by the coordinator and by tools."""

from __future__ import annotations

from megathunder.config.sandbox import SandboxConfig
from megathunder.sandbox.interface import Pool
from megathunder.sandbox.pool import SandboxPool
from megathunder.sandbox.remote import RemotePool


def open_pool(config: SandboxConfig) -> Pool:
    """Not started yet."""
    return RemotePool(config) if config.backend == "remote" else SandboxPool(config)
