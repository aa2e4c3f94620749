"""Sandboxes of another machine: the pool over HTTP against tools/serve_sandboxes.py, live."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.rewards.grading import grade
from megathunder.sandbox import ExecResult, Pool, SandboxPool, open_pool
from megathunder.sandbox.interface import Sandbox
from megathunder.sandbox.remote_pool import RemotePool
from megathunder.tasks import TaskFile, build_source

ROOT = Path(__file__).resolve().parents[2]
KEY = "the key of this test"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, subprocess.Popen]]:
    """(address, process) of a server; it ends cleanly when told to."""
    settings = ["--sandbox.api_key", KEY, "--sandbox.max_open", "3", "--sandbox.warm", "1", "--sandbox.lifetime_s", "3"]
    process = subprocess.Popen(
        [sys.executable, "tools/serve_sandboxes.py", *settings],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    line = process.stdout.readline()
    assert line.startswith("serving sandboxes at http://127.0.0.1:"), line
    yield line.split()[-1], process
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def with_pool(url: str, body: Callable[[Pool], Awaitable[object]], **changes: object) -> object:
    async def whole() -> object:
        pool = open_pool(SandboxConfig(**{"backend": "remote", "urls": (url,), "api_key": KEY} | changes))
        await pool.start()
        try:
            return await body(pool)
        finally:
            await pool.close()
            await pool.close()
            assert pool.leaks() == []

    return asyncio.run(whole())


def test_a_remote_sandbox_does_what_a_local_one_does(served):
    async def run(sandbox: Sandbox) -> tuple[list[tuple], list[bytes | None]]:
        commands = ("cat a/b; echo x > c; exit 3", r"printf '\xf0'", "yes | head -c 200000", "sleep 9", "cat c")
        results: list[ExecResult] = [await sandbox.exec(command, 1.0) for command in commands]
        files = [await sandbox.download(path, 10) for path in ("c", "a", "bytes", "none")]
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(InfrastructureFailure, match="closed"):
            await sandbox.exec("true", 1.0)
        return [(r.output, r.exit_status, r.dropped_bytes, r.fault) for r in results], files

    given = [
        TaskFile(path="a/b", content="hello\n"),
        TaskFile(path="bytes", content=b"\xff\xfe".decode(errors="surrogateescape")),
    ]

    async def remote(pool: Pool) -> object:
        assert isinstance(pool, RemotePool)
        return await run(await pool.lease(given))

    async def local() -> object:
        pool = SandboxPool(SandboxConfig(warm=0))
        await pool.start()
        try:
            return await run(await pool.lease(given))
        finally:
            await pool.close()

    assert with_pool(served[0], remote) == asyncio.run(local())


def test_graders_work_on_remote_sandboxes(served):
    async def body(pool: Pool) -> None:
        (task,) = build_source(TasksConfig(kinds=("fix",), size=1)).take(1)
        name, right = task.grading.taken[0], task.prompt.split()[-1]
        for program, reward in ((f"expr $1 + {right}", 1.0), (f"echo {right}", 0.0)):
            sandbox = await pool.lease(task.files, task.image)
            await sandbox.upload([TaskFile(path=name, content=program)])
            assert await grade(task, sandbox, "done", pool, 5.0) == reward

    with_pool(served[0], body)


def test_places_are_waited_for_and_given_back_by_who_goes_away(served):
    async def body(pool: Pool) -> None:
        held = [await pool.lease() for _ in range(3)]
        waiting = asyncio.create_task(pool.lease())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        busy = asyncio.create_task(held[0].exec("sleep 60", 60.0))
        await asyncio.sleep(0.3)
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        for sandbox in held:
            await sandbox.close()
        again = await asyncio.gather(*(pool.lease() for _ in range(3)))
        assert [(await s.exec("echo $((1+1))", 5.0)).output for s in again] == ["2\n"] * 3

    with_pool(served[0], body)


def test_a_client_that_died_holds_nothing_after_the_lifetime(served):
    async def die() -> None:
        pool = RemotePool(SandboxConfig(backend="remote", urls=(served[0] + "/",), api_key=KEY))
        await pool.start()
        await asyncio.gather(*(pool.lease() for _ in range(3)))
        await pool._session.close()

    async def body(pool: Pool) -> None:
        sandbox = await pool.lease()  # there is no place before the others are over
        assert (await sandbox.exec("echo here", 5.0)).output == "here\n"
        await sandbox.close()

    asyncio.run(die())
    started = time.monotonic()
    with_pool(served[0], body)
    assert time.monotonic() - started < 9


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_wrong_key_is_refused_at_the_start(served, key):
    async def never(pool: Pool) -> None:
        raise AssertionError

    with pytest.raises(IsolationError, match="401 not the key"):
        with_pool(served[0], never, api_key=key)


def test_a_server_that_is_not_there_is_refused_with_the_remedy_and_nothing_runs_here():
    pool = open_pool(SandboxConfig(backend="remote", urls=("http://127.0.0.1:9",)))
    with pytest.raises(IsolationError, match="serve_sandboxes.py"):
        asyncio.run(pool.start())


@pytest.mark.parametrize(
    ("words", "remedy"),
    [(["--host", "0.0.0.0"], "--sandbox.api_key"), (["--sandbox.backend", "remote"], "bubblewrap or docker")],
)
def test_a_server_that_would_be_open_to_anyone_or_serve_nothing_is_refused(capsys, words, remedy):
    assert runpy.run_path(str(ROOT / "tools" / "serve_sandboxes.py"))["main"](words) == 2
    assert remedy in capsys.readouterr().err
