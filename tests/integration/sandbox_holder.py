"""A process with open sandboxes, for test_sandbox_orphans.py: says where it stands and waits to be killed.

python sandbox_holder.py starting | running | grading | closing
"""

from __future__ import annotations

import asyncio
import sys

from megathunder.config.sandbox import SandboxConfig
from megathunder.rewards.grading import grade
from megathunder.sandbox import SandboxPool
from megathunder.sandbox.local import LocalSandbox
from megathunder.tasks import ProgramCheck, Task, TaskFile

CONFIG = SandboxConfig(warm=3, memory_mb=256, disk_mb=8)
AT_ONCE = 16
BUSY = "setsid sleep 600 & trap '' TERM INT HUP; while :; do :; done"


async def starting() -> None:
    """Many at once, so that some are in the middle whenever the end comes."""
    members = [LocalSandbox(CONFIG, slot) for slot in range(AT_ONCE)]
    tasks = [asyncio.create_task(member.start()) for member in members]
    await asyncio.sleep(0)  # now each has its process
    print("starting", flush=True)
    await asyncio.gather(*tasks)


async def opened(what: str) -> None:
    """A pool whose lease runs a command, is graded, or is being given back."""
    pool = SandboxPool(CONFIG)
    await pool.start()
    sandbox = await pool.lease()
    files = (TaskFile(path="busy.sh", content=BUSY),)
    check = ProgramCheck(taken=(), command="bash busy.sh", expected="", files=files)
    task = Task(id="t", kind="k", prompt="p", files=(), grading=check)
    if what == "closing":
        await sandbox.exec("for i in $(seq 2000); do : > $i; done", 10.0)
        work = asyncio.gather(sandbox.close(), pool.close())
    else:
        work = grade(task, sandbox, "done", pool, 600.0) if what == "grading" else sandbox.exec(BUSY, 600.0)
    running = asyncio.ensure_future(work)
    if what != "closing":
        await asyncio.sleep(0.3)
    print(what, flush=True)
    await running


async def main(what: str) -> None:
    await (starting() if what == "starting" else opened(what))
    print("done", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
