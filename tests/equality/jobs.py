"""Starts jobs of several ranks on this machine, as torchrun would."""

import os
import socket
import subprocess
import sys


def run_job(module, arguments, ranks, *, timeout_s=280):
    """Run `python -m module arguments` in `ranks` processes; AssertionError with their output where one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(o[-3000:] for o in outputs)
