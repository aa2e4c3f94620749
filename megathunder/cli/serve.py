"""Rollout servers of one machine, started as a run would start them, for a run that is given their addresses.

    python tools/serve.py --config C.toml --rollout.servers 4 --rollout.host "$(hostname)" [--announce FOLDER]

--announce  a folder that the learner's machines see: each server that is healthy is a file HOST-NUMBER there, one line
            with its URL; the file goes when the server goes.  --logs FOLDER: one log a server (default: runs/servers)
Everything else is a setting as in tools/train.py. Servers that die are restarted, `rollout.max_restarts` times each;
the run that uses them sees them come back and sends them the current weights first.
Exit status: 0 after SIGTERM or Ctrl-C, 1 when a server is lost, 2 for an invalid configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from megathunder.config import Config
from megathunder.config.hub import resolve_models
from megathunder.config.load import load_config
from megathunder.config.machine_checks import (
    check_cpu_cores,
    check_devices,
    check_ports,
    check_server_exposure,
)
from megathunder.config.model_checks import check_model_folder
from megathunder.errors import UserError
from megathunder.metrics.run_folder import write_atomically
from megathunder.rollout import ServerPool
from megathunder.types import ServerAddress

LOOK_EVERY_S = 0.5


def main(argv: list[str]) -> int:
    """Check, serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(
        prog="serve.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--announce", type=Path, help="folder for the addresses of healthy servers")
    parser.add_argument("--logs", type=Path, default=Path("runs/servers"), help="folder for their logs")
    options, settings = parser.parse_known_args(argv)
    try:
        config = resolve_models(load_config(settings, prog="serve.py"))
        for validate in (check_cpu_cores, check_devices, check_server_exposure, check_ports):
            validate(config)
        check_model_folder(config.learner.model, "learner.model")
        return asyncio.run(serve(config, options.announce, options.logs))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


async def serve(config: Config, announce: Path | None, logs: Path) -> int:
    """Start, announce, and keep the announcements true."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    pool = ServerPool(
        config.rollout,
        Path(config.learner.model),
        folder=logs / config.rollout.host,
        urls=(),
        speculation=config.drafting,
    )
    board = Board(announce, config.rollout.host)
    try:
        starting = asyncio.create_task(pool.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        await starting
        print("serving", *(server.url for server in pool.ready), flush=True)
        while not stop.is_set():
            board.show(pool.ready)
            if len(pool.servers) < config.rollout.servers:
                print(f"error: a server of {config.rollout.host} is lost; see {logs}", file=sys.stderr)
                return 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_EVERY_S)
        return 0
    finally:
        board.show(())
        await pool.close()


class Board:
    """The files of this machine's servers in a folder; `None`: nothing is written."""

    def __init__(self, folder: Path | None, host: str) -> None:
        self._folder, self._host = folder, host
        self._shown: dict[str, str] = {}

    def show(self, servers: tuple[ServerAddress, ...]) -> None:
        """Exactly these are announced."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        wanted = {f"{self._host}-{server.name.rpartition('-')[2]}": server.url for server in servers}
        for name in self._shown.keys() - wanted.keys():
            (self._folder / name).unlink(missing_ok=True)
        for name in wanted.keys() - self._shown.keys():
            write_atomically(self._folder / name, f"{wanted[name]}\n".encode())
        self._shown = wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
