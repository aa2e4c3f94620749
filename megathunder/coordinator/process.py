"""The coordinator process: `python -m megathunder.coordinator.process CONFIG CELLS HOST FD`, started by rank 0.

It listens on HOST and writes the whole address to the pipe FD, reads the run's token from the environment, assembles
the run, trains, and ends with 0. It ends with 1 and one clear message when the run fails, with 2 for an error the user
can mend, as `shutdown.py` says on a signal; whatever happens, servers and sandboxes are taken down first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megathunder.background import supervised
from megathunder.checkpoint.resume import resume_hint
from megathunder.config import Config
from megathunder.config.toml import read_config
from megathunder.coordinator.assembly import OnRestart, Parts, assemble
from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.coordinator.rollouts import Stopped
from megathunder.coordinator.shutdown import ShutdownHandler
from megathunder.errors import MegathunderError, UserError
from megathunder.logs import configure_logging
from megathunder.loop import train
from megathunder.metrics.run_folder import RunFolder
from megathunder.process_exit import describe_os_error, print_error, system_error
from megathunder.types import ServerAddress, Shutdown

SHUTDOWN_S = 60.0
FAILED_SHUTDOWN_S = 5.0  # cells may be in the middle of something; they also end when this process has


Assemble = Callable[[Config, LearnerClient, OnRestart], contextlib.AbstractAsyncContextManager[Parts]]


async def run(
    config: Config,
    learner: LearnerClient,
    announce: Callable[[str], None],
    shutdown: ShutdownHandler,
    assemble: Assemble,
) -> None:
    """A whole run, from listening for the learner to the report."""
    announce(learner.address)
    ready: asyncio.Future[Coordinator] = asyncio.get_running_loop().create_future()

    async def on_restart(server: ServerAddress) -> None:
        await (await ready).republish(server)

    limit_s = FAILED_SHUTDOWN_S
    try:
        async with assemble(config, learner, on_restart) as parts:
            coordinator = Coordinator(config=config, parts=parts)
            ready.set_result(coordinator)
            await take_updates(coordinator, shutdown)
        limit_s = SHUTDOWN_S
    finally:
        try:
            await dismiss(config, learner, shutdown, limit_s)
        finally:
            await learner.close()


async def dismiss(config: Config, learner: LearnerClient, shutdown: ShutdownHandler, limit_s: float) -> None:
    """Tell the learner's ranks that the run has ended. Where it ended well before they had all reported they are waited
    for: they would take silence for a failure. InfrastructureFailure where they do not come, so that torchrun ends
    them."""
    if shutdown.succeeded and learner.cells * config.learner.ranks_of_a_cell > 1:
        limit_s = config.run.stop_timeout_s
        await learner.connect(limit_s)
    if learner.hellos:
        with contextlib.suppress(MegathunderError):  # the reason why the run failed has been raised
            await learner.everywhere(lambda item: Shutdown(item=item), limit_s)


async def take_updates(coordinator: Coordinator, shutdown: ShutdownHandler) -> None:
    """From the first update that is left, to the last one or to where the run is asked to stop."""
    try:
        await _until_stopped(coordinator, shutdown)
    except asyncio.CancelledError:
        if not shutdown.interrupted:
            coordinator.parts.monitor.skip_report()
        raise
    except MegathunderError:
        coordinator.print_last_checkpoint()
        raise
    finally:
        await coordinator.end_rollouts()
    await coordinator.finish()


async def _until_stopped(coordinator: Coordinator, shutdown: ShutdownHandler) -> None:
    """Whatever ends an update in its middle, a line of it stays."""
    try:
        await coordinator.begin()
        shutdown.stop = coordinator.stop
        shutdown.updates_done = lambda: coordinator.update
        await train(coordinator)
    except Stopped:
        coordinator.record_unfinished("the run was asked to end")
    except asyncio.CancelledError:
        coordinator.record_unfinished("interrupted")
        raise
    except Exception as error:
        coordinator.record_unfinished(_first(error))
        raise


def main(config_file: str, cells: str, host: str, descriptor: str, *, assemble: Assemble = assemble) -> int:
    """See the module docstring; the exit status. A measurement passes parts of its own."""
    config, parent = read_config(Path(config_file)), os.getppid()
    configure_logging(RunFolder(Path(config.run.folder) / config.run.name).warnings)
    if config.rollout.cpu_cores:
        os.sched_setaffinity(0, config.rollout.cpu_cores)

    def announce(address: str) -> None:
        with os.fdopen(int(descriptor), "w") as pipe:
            pipe.write(address + "\n")

    async def watched() -> int:
        folder = RunFolder(Path(config.run.folder) / config.run.name)
        shutdown = ShutdownHandler(asyncio.current_task(), parent, config.run.stop_timeout_s, folder)
        learner = LearnerClient(int(cells), os.environ["MEGATHUNDER_TOKEN"], host=host)
        try:
            async with supervised():
                await run(config, learner, announce, shutdown, assemble)
        except asyncio.CancelledError:
            return shutdown.status()
        return 0

    try:
        return asyncio.run(watched())
    except Exception as error:  # what is not known is raised again
        return _explain(error, RunFolder(Path(config.run.folder) / config.run.name))


def _first(error: BaseException) -> str:
    """The error in words; of a group the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{error}" if isinstance(error, MegathunderError) else f"{type(error).__name__}: {error}"


def _explain(error: Exception, folder: RunFolder) -> int:
    known = error
    while isinstance(known, ExceptionGroup):  # of the collector's task group: the first one says why
        known = known.exceptions[0]
    if isinstance(known, MegathunderError):
        print_error(str(known))
        return 2 if isinstance(known, UserError) else 1
    refused = system_error(error)
    if refused is None:
        raise error
    print_error(describe_os_error(refused, folder.path, resume_hint(folder.checkpoints)))
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
