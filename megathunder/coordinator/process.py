"""The coordinator process: `python -m megathunder.coordinator.process CONFIG CELLS FD`, started by rank 0.

It writes the address it listens on to the pipe FD, reads the run's token from the environment, assembles the run,
trains, and ends with 0. It ends with 1 and one clear message when the run fails, with 2 for an error the user can
mend, with 130 on an interrupt; whatever happens, servers and sandboxes are taken down first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from megathunder.coordinator.assembly import assemble, assemble_replay
from megathunder.config import Config
from megathunder.config.toml import read_config
from megathunder.coordinator.coordinator import Coordinator
from megathunder.errors import MegathunderError, UserError
from megathunder.learner.remote import LearnerClient
from megathunder.loop import train
from megathunder.types import ServerAddress, Shutdown

SHUTDOWN_S = 60.0


async def run(config: Config, cells: int, token: str, announce: Callable[[str], None]) -> None:
    """A whole run, from listening for the learner to the report."""
    learner = LearnerClient(cells, token)
    announce(learner.address)
    ready: asyncio.Future[Coordinator] = asyncio.get_running_loop().create_future()

    async def on_restart(server: ServerAddress) -> None:
        await (await ready).republish(server)

    try:
        replayed = bool(config.replay.run)
        async with assemble_replay(config, learner) if replayed else assemble(config, learner, on_restart) as parts:
            ready.set_result(Coordinator(config=config, parts=parts))
            await train(ready.result())
        await learner.everywhere(lambda item: Shutdown(item=item), SHUTDOWN_S)
    finally:
        await learner.close()


def main(config_file: str, cells: str, descriptor: str) -> int:
    """See the module docstring; the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config, parent = read_config(Path(config_file)), os.getppid()
    if config.rollout.cpu_cores:
        os.sched_setaffinity(0, config.rollout.cpu_cores)

    def announce(address: str) -> None:
        with os.fdopen(int(descriptor), "w") as pipe:
            pipe.write(address + "\n")

    try:
        asyncio.run(_until_stopped(run(config, int(cells), os.environ["MEGATHUNDER_TOKEN"], announce)))
    except (UserError, MegathunderError, ExceptionGroup) as error:
        return _explain(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        orphaned = os.getppid() != parent
        print("error: the learner's rank 0 has died; the run ends" if orphaned else "stopped", file=sys.stderr)
        return 1 if orphaned else 130
    return 0


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Run `work`; SIGTERM and SIGINT cancel it, so that everything it started is ended."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, task.cancel)
    await task


def _explain(error: Exception) -> int:
    known = error
    while isinstance(known, ExceptionGroup):  # of the collector's task group: the first one says why
        known = known.exceptions[0]
    if not isinstance(known, MegathunderError):
        raise error
    print(f"error: {known}", file=sys.stderr)
    return 2 if isinstance(known, UserError) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
