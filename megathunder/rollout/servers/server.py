"""One SGLang server as a process of this run: start, readiness, end.

It leads its own process group, dies with the process that started it (`processes.guarded`), writes to one log file,
and is killed with everything it started. Called by `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from pathlib import Path

import aiohttp

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.errors import UserError
from megathunder.processes import guarded, kill_family, url_of
from megathunder.rollout.servers.command import server_command, server_environment

LOG_LINES_SHOWN = 12


class ServerProcess:
    """A running server at `url`. Make one with `start_server`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: Path, temporary: Path) -> None:
        self.url, self.log = url, log
        self._process, self._temporary = process, temporary

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def exited(self) -> int:
        """Wait for the end."""
        return await self._process.wait()

    async def kill(self) -> None:
        """End the server and all it started, at once. Idempotent."""
        await kill_family(self._process)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def log_tail(self) -> str:
        """The end of its log, for error messages."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:])


async def start_server(
    config: RolloutConfig,
    *,
    model: Path,
    port: int,
    device: str,
    version: int,
    log: Path,
    index: int = 0,
    speculation: SpeculationConfig | None = None,
) -> ServerProcess:
    """Start a server of `model` and wait until it answers; raises UserError when it exits or takes too long."""
    temporary = Path(tempfile.mkdtemp(prefix="mt-"))  # socket paths must be short
    command = server_command(
        config, model=model, port=port, device=device, version=version, index=index, speculation=speculation
    )
    with log.open("ab") as output:
        output.write((" ".join(command) + "\n").encode())
        process = await asyncio.create_subprocess_exec(
            *guarded(command, cores=config.cpu_cores),
            env=server_environment(
                device,
                temporary,
                ranks=config.gpus_per_server,
                speculation=speculation,
                cpu_kernels=config.cpu_kernels,
            ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = ServerProcess(process, url_of(config.host, port), log, temporary)
    try:
        await _until_ready(server, config)
    except BaseException:
        await asyncio.shield(server.kill())
        raise
    return server


async def _until_ready(server: ServerProcess, config: RolloutConfig) -> None:
    deadline = time.monotonic() + config.startup_timeout_s
    async with aiohttp.ClientSession(headers=authorization(config.api_key)) as session:
        while time.monotonic() < deadline:
            if server.exit_status is not None:
                raise UserError(
                    f"the SGLang server of {server.url} exited with status {server.exit_status} before it was ready",
                    expected="a server that answers",
                    remedy=f"read {server.log}; it ends with:\n{server.log_tail()}",
                )
            if await is_healthy(session, server.url, timeout_s=5.0):
                await _freeze(session, server.url)
                return
            await asyncio.sleep(0.2)
    raise UserError(
        f"the SGLang server of {server.url} did not answer within {config.startup_timeout_s:.0f} s",
        expected="a server that answers",
        remedy=f"read {server.log}, or raise rollout.startup_timeout_s; it ends with:\n{server.log_tail()}",
    )


def authorization(api_key: str) -> dict[str, str]:
    """HTTP headers that carry the key, if there is one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _freeze(session: aiohttp.ClientSession, url: str) -> None:
    """Leave what the server holds now out of its garbage collections: on a CPU every flush of its cache collects, and
    walks through half a second of modules otherwise. A server without the endpoint only is slower."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
        async with session.post(url + "/freeze_gc", timeout=aiohttp.ClientTimeout(total=5.0)):
            pass


async def is_healthy(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> bool:
    """Whether the server answers /health with 200 within the limit."""
    try:
        async with session.get(url + "/health", timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def can_generate(session: aiohttp.ClientSession, url: str, *, timeout_s: float) -> bool:
    """Whether anything comes out of the server's scheduler (SGLang waits 20 s for it), which /health does not ask. A
    server without /health_generate is believed."""
    try:
        async with session.get(url + "/health_generate", timeout=aiohttp.ClientTimeout(total=timeout_s)) as answer:
            return answer.status in (200, 404)
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
