"""Starts jobs of several ranks on this machine, as torchrun would, but forked from a process that has the imports."""

import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import warnings
from multiprocessing import connection
from pathlib import Path

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["tests.equality.preloaded"])
FRESH = multiprocessing.get_context("spawn")


def run_job(module, arguments, ranks, *, timeout_s=280, context=FORKED):
    """Run `main` of `module` with `arguments` in `ranks` processes; AssertionError with their output where one fails.

    `context` FRESH starts interpreters anew: for a rank that must import something else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        running = [
            context.Process(
                target=run_rank, args=(module, [str(a) for a in arguments], job | {"RANK": str(rank)}, str(log))
            )
            for rank, log in enumerate(logs)
        ]
        for process in running:
            process.start()
        wait_for(running, timeout_s)
        said = "\n".join(log.read_text()[-3000:] for log in logs if log.exists())
        statuses = [process.exitcode for process in running]
    assert statuses == [0] * ranks, f"exit statuses {statuses}\n{said}"


def wait_for(running, timeout_s):
    """Until all have ended, or `timeout_s`; once one has failed the others are given two seconds to say why."""
    deadline_s, left = time.monotonic() + timeout_s, {process.sentinel: process for process in running}
    while left and (remaining_s := deadline_s - time.monotonic()) > 0:
        for sentinel in connection.wait(list(left), remaining_s):
            process = left.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline_s = min(deadline_s, time.monotonic() + 2.0)
    for process in running:
        process.kill()
        process.join()


def run_rank(module, arguments, environment, log):
    os.environ |= environment | {"LOCAL_RANK": environment["RANK"]}
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}  # for one that imports torch only now
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()
