"""Where untrusted commands run, and within which limits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxConfig:
    """[sandbox] isolation and limits of what a policy's commands may do."""

    backend: Literal["bubblewrap", "docker", "remote"] = "bubblewrap"
    """Isolation: `bubblewrap` (namespaces, capability drop, seccomp), `docker` (containers of a daemon), `remote`
    (sandboxes of other machines, tools/serve_sandboxes.py). None takes another's place, and none falls back to the
    host."""
    urls: tuple[str, ...] = ()
    """Sandbox servers that `remote` uses."""
    api_key: str = ""
    """Key of the sandbox servers."""
    image: str = "python:3.11-bookworm"
    """Image of `docker` for tasks that name none; needs bash, tar, coreutils and /usr/bin/python3."""
    docker_host: str = ""
    """Address of the Docker daemon; empty: DOCKER_HOST, or the usual socket."""
    container_user: str = "1000:1000"
    """Who commands run as in a container, as uid:gid; never 0."""
    command_timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one command."""
    cpu_s: PositiveInt = 60
    """CPU time one process may use."""
    processes: PositiveInt = 64
    """Processes alive at once in one sandbox."""
    memory_mb: PositiveInt = 512
    """Address space of one process, and resident memory of all processes of one sandbox."""
    disk_mb: PositiveInt = 32
    """Size of the work folder."""
    inodes: PositiveInt = 4096
    """Files in the work folder."""
    output_bytes: PositiveInt = 65536
    """Output kept of one command, head and tail; the rest is counted."""
    max_running: PositiveInt = 64
    """Commands that run at the same time over all sandboxes; a waiting command counts, so lower it for heavy ones."""
    max_open: PositiveInt = 128
    """Sandboxes open at the same time."""
    warm: NonNegativeInt = 8
    """Sandboxes kept started and empty, so that an episode need not wait for one."""
    max_grading: NonNegativeInt = 0
    """Graders that run at the same time, since their limit is one of wall time and a crowd of test suites would earn
    zeros for being slow; the rest wait, outside their limit. 0: one a core, or `max_running` where sandboxes are on
    other machines."""
    grading_budget_s: PositiveFloat = 60.0
    """Time the grader of one trajectory may take; a task may set a shorter one. What still runs then earns 0."""
    lifetime_s: PositiveFloat = 7200.0
    """A leased sandbox is ended after this, whatever its holder does; at least the deadline of a trajectory and its
    grading."""

    @property
    def graders(self) -> int:
        """How many graders run at the same time."""
        elsewhere = self.max_running if self.backend == "remote" else len(os.sched_getaffinity(0))
        return self.max_grading or elsewhere
