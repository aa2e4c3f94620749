"""Memory of a run: resident bytes of its processes on this host, and what the host has. Called once an update."""

from __future__ import annotations

import psutil


def host_memory_bytes(process_id: int | None = None) -> int:
    """Resident bytes of a process and all its descendants (servers, sandboxes); shared pages count in each."""
    root = psutil.Process(process_id)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # ended since it was listed
            continue
    return total


def host_limit_bytes() -> int:
    """Memory this machine has."""
    return psutil.virtual_memory().total
