"""Child processes that cannot outlive their parent, and what a start needs of the machine: cores, ports, addresses.

    guarded(command)        a command line whose process the kernel kills when its parent dies, however that dies
    kill_family(process)    end a process group and everything that was started from it

`python -S -I processes.py PARENT_PID CORES COMMAND...` is what `guarded` runs: it sets the death signal (which survives
exec), stays on CORES (a comma list, or `-`) and becomes COMMAND; it exits with 113 if the parent is already gone. It
uses the standard library alone (and `-I`, since this folder has a `types.py`), so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

PR_SET_PDEATHSIG = 1
PARENT_GONE = 113
DEATH_S = 2.0  # for killed processes to be gone


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """From now on the kernel sends `signum` when the process that started this one dies, however it dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signum)


def guarded(command: Sequence[str], *, cores: Sequence[int] = ()) -> list[str]:
    """`command`, to be started by this process: it dies with it, and stays on `cores` if there are any."""
    return [sys.executable, "-S", "-I", __file__, str(os.getpid()), ",".join(map(str, cores)) or "-", *command]


async def kill_family(process: Process) -> None:
    """Kill the group that `process` leads and all its descendants, and wait until they are gone. Idempotent."""
    import asyncio  # here, so that the script starts quickly and needs no site-packages

    import psutil

    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    await process.wait()
    await asyncio.to_thread(psutil.wait_procs, family, timeout=DEATH_S)


def missing_cores(cores: Sequence[int]) -> list[int]:
    """Those that this process may not run on."""
    return sorted(set(cores) - os.sched_getaffinity(0))


def port_error(host: str, port: int) -> str:
    """Why no server could bind to it now; empty if one could."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's wait is not a listener
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
        return ""


def url_of(host: str, port: int) -> str:
    """http://host:port, an IPv6 address in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _become(parent: int, cores: str, command: list[str]) -> None:
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(PARENT_GONE)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
