"""What isolates, by name: bubblewrap on this machine, containers of a Docker daemon.

Called by sandbox.pool. Neither ever runs anything on the bare host, and none takes the place of another: what is
configured and does not hold is refused, with the remedy.
"""

from __future__ import annotations

import os
from pathlib import Path

from megathunder.config.sandbox import SandboxConfig
from megathunder.sandbox.bubblewrap import identity
from megathunder.sandbox.interface import Backend, Member
from megathunder.sandbox.local import LocalSandbox
from megathunder.sandbox.probe import probe


class Bubblewrap:
    """Sandboxes of this machine, which share its /usr: there are no images."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config

    async def probe(self) -> None:
        await probe(self._config)

    def make(self, slot: int, image: str) -> Member:
        return LocalSandbox(self._config, slot)

    def image_of(self, image: str) -> str:
        return ""

    def leaks(self, slots: int) -> list[str]:
        """Processes under a uid of the pool. Mounts are in a namespace that ends with them; a sandbox makes no folder
        and no cgroup of the host."""
        owners = (identity(slot) for slot in range(slots))
        uids = {who.uid for who in owners if who.own_uid}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                owner = os.stat(f"/proc/{pid}").st_uid
                if owner in uids:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found.append(f"pid {pid} of uid {owner}: {name}")
            except OSError:
                continue  # ended meanwhile
        return found

    def close(self) -> None:
        """It holds nothing."""


def build_backend(config: SandboxConfig) -> Backend:
    """The backend that `sandbox.backend` names."""
    if config.backend == "docker":
        from megathunder.sandbox.docker import DockerBackend  # the SDK is installed only where it is asked for

        return DockerBackend(config)
    return Bubblewrap(config)
