"""What isolates, by name: bubblewrap on this machine, containers of a Docker daemon.

Called by sandbox.pool. Neither ever runs anything on the bare host, and none takes the place of another: what is
configured and does not hold is refused, with the remedy.
"""

from __future__ import annotations

import os
from pathlib import Path

from megathunder.config.sandbox import SandboxConfig
from megathunder.sandbox.bubblewrap import identity, owner_mark
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
        """Processes under a uid of the pool, and those of a sandbox whose bwrap is no child of this process any more.
        Mounts are in a namespace that ends with them; a sandbox makes no folder and no cgroup of the host. What was
        just closed may still be on its way out; `SandboxPool.close` waits for that."""
        owners = (identity(slot) for slot in range(slots))
        uids = {who.uid for who in owners if who.own_uid}
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                owner = os.stat(f"/proc/{pid}").st_uid
                if owner in uids or is_orphan(pid):
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    found.append(f"pid {pid} of uid {owner}: {name}")
            except OSError:
                continue  # ended meanwhile
        return found

    def close(self) -> None:
        """It holds nothing."""


def is_orphan(pid: str) -> bool:
    """Whether it is a bwrap or a supervisor of this process that hangs on none of its children. Raises OSError."""
    if not Path(f"/proc/{pid}/cmdline").read_bytes().endswith(f"\0{owner_mark()}\0".encode()):
        return False
    parent, me = parent_of(pid), str(os.getpid())
    return me not in (parent, parent_of(parent))


def parent_of(pid: str) -> str:
    """Its parent; process 1 and what came from outside have "0", which has itself."""
    return "0" if pid == "0" else Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]


def build_backend(config: SandboxConfig) -> Backend:
    """The backend that `sandbox.backend` names."""
    if config.backend == "docker":
        from megathunder.sandbox.docker import DockerBackend  # the SDK is installed only where it is asked for

        return DockerBackend(config)
    return Bubblewrap(config)
