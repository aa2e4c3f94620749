"""The sandbox started without root: a user namespace, one uid for supervisor and commands, a new sandbox an episode."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.sandbox import SandboxPool, bubblewrap, local
from megathunder.tasks import TaskFile

NOBODY = 65534


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts sandboxes as another user where the tests run as root."""
    if os.geteuid() != 0:
        return
    popen = functools.partial(subprocess.Popen, user=NOBODY, group=NOBODY, extra_groups=[])
    monkeypatch.setattr(bubblewrap.subprocess, "Popen", popen)
    monkeypatch.setattr(local, "identity", lambda slot: bubblewrap.Identity(own_uid=False, uid=1000))


@pytest.mark.usefixtures("unprivileged")
def test_unprivileged_sandbox_isolates_as_well_or_refuses_with_a_remedy() -> None:
    async def body() -> None:
        pool = SandboxPool(SandboxConfig(warm=1))
        try:
            await pool.start()
        except IsolationError as refusal:
            assert "user namespaces" in refusal.remedy
            return
        sandbox = await pool.lease([TaskFile(path="a", content="1\n")])
        attack = "cat a; kill -9 1; kill -STOP 1; kill -9 -1; (cat /proc/1/mem /proc/1/environ | wc -c)"
        result = await sandbox.exec(f"{attack}; ls /proc/1/fd; (setsid sleep 50 &); echo end", 5.0)
        assert result.output.startswith("1\n") and result.output.endswith("end\n")
        assert (await sandbox.exec("(: > /usr/x) || ls -d /proc/[0-9]* | wc -l", 5.0)).output.split()[-1] in "345"
        bomb = await sandbox.exec("ulimit -Hu; [ $(ulimit -Hu) = 64 ] && :(){ :|:& };:; sleep 20", 1.0)
        assert bomb.fault == "timeout" and bomb.output.startswith("64")
        assert (await sandbox.exec("echo alive", 5.0)).output == "alive\n"
        await sandbox.exec("echo x > /tmp/left", 5.0)
        await sandbox.close()
        fresh = await pool.lease()
        assert (await fresh.exec("ls -A /work /tmp | wc -w", 5.0)).output.split() == ["2"]
        await pool.close()

    asyncio.run(body())


@pytest.mark.usefixtures("unprivileged")
def test_dead_unprivileged_sandbox_is_a_result_and_not_a_hang() -> None:
    async def body() -> None:
        sandbox = local.LocalSandbox(SandboxConfig(), 0)
        try:
            await sandbox.start()
        except InfrastructureFailure:  # no user namespaces here: the test above shows the refusal
            return
        running = asyncio.create_task(sandbox.exec("sleep 20", 30.0))
        await asyncio.sleep(0.2)
        sandbox._process.kill()
        assert (await asyncio.wait_for(running, 5)).fault == "died"
        await sandbox.close()

    asyncio.run(body())
