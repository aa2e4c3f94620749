#!/usr/bin/env python
"""Sandboxes of this machine for runs on others, which set sandbox.backend = "remote" and sandbox.urls.

    python tools/serve_sandboxes.py --config C.toml [--host 127.0.0.1] [--port 7070] --sandbox.max_open 64

The backend of this machine is `sandbox.backend` (bubblewrap or docker); its isolation is measured before anything is
served. Everything else is a setting as in tools/train.py; `sandbox.api_key` is asked of every client, and needed where
others than this machine can reach the address: whoever reaches it runs commands here, in sandboxes.
Exit status: 0 after SIGTERM or Ctrl-C, 2 for a setting to mend.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this checkout

from megathunder.config import Config
from megathunder.config.load import load_config
from megathunder.config.machine_checks import LOOPBACK
from megathunder.config.sandbox_checks import check_docker_sdk, check_sandbox_installed
from megathunder.errors import ConfigError, UserError
from megathunder.sandbox import SandboxPool
from megathunder.sandbox.remote_server import SandboxServer


def main(argv: list[str]) -> int:
    """Check, serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(
        prog="serve_sandboxes.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    options, settings = parser.parse_known_args(argv)
    try:
        config = load_config(settings, prog="serve_sandboxes.py")
        check(config, options.host)
        return asyncio.run(serve(config, options.host, options.port))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def check(config: Config, host: str) -> None:
    """Refuse what would serve nothing, or serve it to anyone."""
    if config.sandbox.backend == "remote":
        raise ConfigError(
            "sandbox.backend = 'remote' on a sandbox server",
            expected="what isolates on this machine",
            remedy="set --sandbox.backend bubblewrap or docker",
        )
    if host not in LOOPBACK and not config.sandbox.api_key:
        raise ConfigError(
            f"--host {host} with no sandbox.api_key",
            expected="a key where others can reach the server: whoever reaches it runs commands in its sandboxes",
            remedy="set --sandbox.api_key, or --host 127.0.0.1",
        )
    check_sandbox_installed(config)
    check_docker_sdk(config)


async def serve(config: Config, host: str, port: int) -> int:
    """Measure, serve, and end every sandbox on the way out."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    pool = SandboxPool(config.sandbox)
    server = SandboxServer(pool, api_key=config.sandbox.api_key, lifetime_s=config.sandbox.lifetime_s)
    runner = web.AppRunner(server.app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    try:
        await pool.start()
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        print(f"serving sandboxes at http://{host}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
        return 0
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}:{port} ({error.strerror})", expected="a free address", remedy="--port 0"
        ) from error
    finally:
        await runner.cleanup()
        await pool.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
