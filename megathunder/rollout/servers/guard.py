"""Start a command that cannot outlive its parent: `python guard.py PARENT_PID CORES COMMAND...`.

The kernel kills the command when the process that started it dies, however that dies (PR_SET_PDEATHSIG survives exec).
CORES is a comma list of cores to stay on, or `-`. Run as a script by `rollout/servers/server.py`; standard
library only, so
that it starts in milliseconds. Exits 113 if the parent is already gone.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, cores: str, command: list[str]) -> None:
    """Replace this process by `command`; returns never."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(113)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
