"""No process of a sandbox outlives the one that holds it, whenever and however that is ended."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.sandbox.backends import Bubblewrap
from megathunder.sandbox.local import LocalSandbox

HOLDER = Path(__file__).with_name("sandbox_holder.py")
WITHIN_S = 5.0
CONFIG = SandboxConfig(memory_mb=256, disk_mb=8)


def processes_of(holder: int) -> list[str]:
    """bwraps and supervisors of the sandboxes of process `holder`; commands end with their supervisor."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if line.endswith(f"\0megathunder-{holder}\0".encode()):
                found.append(f"{pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
        except OSError:
            continue
    return found


def left_after_a_while(holder: int) -> list[str]:
    limit = time.monotonic() + WITHIN_S
    while (left := processes_of(holder)) and time.monotonic() < limit:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", ["starting", "running", "grading", "closing"])
def test_nothing_survives_a_process_group_that_is_killed(moment: str, signum: signal.Signals) -> None:
    """The whole group gets the signal, as from `timeout` or a terminal."""
    holder = subprocess.Popen(
        [sys.executable, str(HOLDER), moment], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert holder.stdout.readline() == f"{moment}\n"
        assert moment == "closing" or processes_of(holder.pid)
    finally:
        os.killpg(holder.pid, signum)
        holder.wait(WITHIN_S)
        holder.stdout.close()
    assert left_after_a_while(holder.pid) == []


def test_a_start_that_is_given_up_at_any_moment_leaves_nothing() -> None:
    """bwrap that is killed while it sets up would leave a child that waits for ever."""
    rng = random.Random(0)

    async def one(slot: int) -> None:
        sandbox = LocalSandbox(CONFIG, slot)
        start = asyncio.create_task(sandbox.start())
        await asyncio.sleep(rng.random() * 0.012)
        start.cancel()
        await asyncio.wait([start])
        await sandbox.close()

    async def all_of_them() -> None:
        for slot in range(40):
            await one(slot)

    asyncio.run(all_of_them())
    left_after_a_while(os.getpid())
    assert processes_of(os.getpid()) == [] and Bubblewrap(CONFIG).leaks(64) == []


def test_a_sandbox_that_hangs_on_nobody_is_a_leak() -> None:
    """Ended behind the back of its bwrap: what is left is named."""
    backend = Bubblewrap(CONFIG)

    async def body() -> None:
        sandbox = LocalSandbox(CONFIG, 0)
        await sandbox.start()
        assert backend.leaks(1) == []
        await sandbox.close()

    asyncio.run(body())
    stray = f"exec -a stray {sys.executable} -c 'import time; time.sleep(60)' x megathunder-{os.getpid()}"
    shell = subprocess.Popen(["bash", "-c", f"( {stray} ) & echo $!"], stdout=subprocess.PIPE, text=True)
    pid = int(shell.stdout.readline())
    try:
        shell.stdout.close()
        shell.wait(5)
        limit = time.monotonic() + WITHIN_S
        found: list[str] = []
        while len(found) != 1 or not found[0].startswith(f"pid {pid} "):  # beside it, the closed one on its way out
            assert time.monotonic() < limit, found
            time.sleep(0.05)
            found = backend.leaks(1)
    finally:
        os.kill(pid, signal.SIGKILL)
