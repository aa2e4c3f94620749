"""The Docker backend against a stand-in for the daemon with real processes. No real daemon has run it."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_docker import FakeDaemon, daemon

from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.rewards.grading import grade
from megathunder.sandbox import SandboxPool
from megathunder.sandbox.docker import judge
from megathunder.tasks import TaskFile, build_source

IMAGE = "python:3.11-bookworm"
CONFIG = {"backend": "docker", "warm": 1, "max_open": 4, "container_user": "54321:54321", "disk_mb": 8}
STANDS_IN = os.geteuid() == 0 and shutil.which("bwrap") and shutil.which("nsenter")
needs_root = pytest.mark.skipif(not STANDS_IN, reason="the stand-in for the daemon needs root, bwrap and nsenter")


def with_daemon(
    folder: Path, body: Callable[[SandboxPool, FakeDaemon], Awaitable[object]], **changes: object
) -> object:
    """What `body` returns; afterwards no container is left."""

    async def whole() -> object:
        pool = SandboxPool(SandboxConfig(**CONFIG | {"docker_host": address} | changes))
        await pool.start()
        try:
            return await body(pool, fake)
        finally:
            await pool.close()
            await pool.close()
            assert pool.leaks() == [] and not fake.containers

    with daemon(folder, IMAGE, "swesmith/tiny") as (fake, address):
        return asyncio.run(whole())


@needs_root
def test_a_container_runs_commands_with_limits_and_keeps_files_but_no_process(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        sandbox = await pool.lease(
            [TaskFile(path="a/b.txt", content="caf\u00e9\n"), TaskFile(path="run", content="id -u", mode=0o755)]
        )
        result = await sandbox.exec("cat a/b.txt; ./run; pwd; exit 3", 5.0)
        assert (result.output, result.exit_status, result.fault) == ("caf\u00e9\n54321\n/work\n", 3, "")
        burnt = await sandbox.exec("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; sleep 30 & sleep 0.2", 10.0)
        assert burnt.fault == "" and 0.1 < burnt.cpu_s < 5 and burnt.wall_s < 8
        started = time.monotonic()
        late = await sandbox.exec("trap '' TERM INT; echo up; (setsid sleep 99 &); sleep 98", 0.5)
        assert late.timed_out and late.output == "up\n" and late.exit_status == 137 and time.monotonic() - started < 5
        assert (await sandbox.exec("ls /proc | grep -c '^[0-9]'; cat run", 5.0)).output.split()[1:] == ["id", "-u"]
        left = await sandbox.exec("for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; done 2>/dev/null", 5.0)
        assert "sleep 99" not in left.output and "sleep 98" not in left.output and "sleep 30" not in left.output
        await sandbox.upload([TaskFile(path=".bin/tool", content="#!/bin/sh\necho mine", mode=0o755)])
        assert (await sandbox.exec("echo $PATH; tool", 5.0)).output == "/usr/bin:/bin:/work/.bin\nmine\n"
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(InfrastructureFailure, match="was closed"):
            await sandbox.exec("true", 1.0)

    with_daemon(tmp_path, body)


@needs_root
def test_output_is_cut_and_counted_and_bytes_that_are_no_text_are_replaced(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        sandbox = await pool.lease()
        long = await sandbox.exec("printf 'first%100000s%s' '' last", 10.0)
        assert long.dropped_bytes == 5 + 100000 + 4 - 2048
        assert long.output.startswith("first ") and long.output.endswith(" last")
        assert f"... {long.dropped_bytes} bytes dropped ..." in long.output
        assert (
            await sandbox.exec(r"printf '\xf0'; printf '\xc3'; sleep 0.1; printf '\xa9'", 5.0)
        ).output == "\ufffd\u00e9"
        await sandbox.close()

    with_daemon(tmp_path, body, output_bytes=2048)


@needs_root
def test_downloads_are_regular_files_within_their_limit_and_uploads_follow_no_link(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        sandbox = await pool.lease()
        await sandbox.exec(
            "head -c 3000 /dev/zero > big; mkfifo pipe; ln -s /etc passwd; echo x > real; ln -s real to", 5.0
        )
        assert await sandbox.download("real", 10) == b"x\n" and await sandbox.download("big", 3000) == bytes(3000)
        for absent in ("big", "none", "pipe", "passwd", "/dev/zero"):
            assert await sandbox.download(absent, 2999) is None
        await sandbox.upload([TaskFile(path="to", content="new")])
        assert (await sandbox.exec("cat real to", 5.0)).output == "x\nnew"
        with pytest.raises(InfrastructureFailure, match="usr"):
            await sandbox.upload([TaskFile(path="/usr/bin/x", content="new")])
        await sandbox.close()

    with_daemon(tmp_path, body)


@needs_root
def test_what_a_daemon_is_asked_for_is_what_isolates(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        sandbox = await pool.lease(image="swesmith/tiny")
        asked = fake.created[-1]
        host = asked["HostConfig"]
        assert asked["Image"] == "swesmith/tiny" and {body["Image"] for body in fake.created[:-1]} == {IMAGE}
        assert asked["User"] == "54321:54321" and asked["NetworkDisabled"] is True
        assert host["NetworkMode"] == "none" and host["CapDrop"] == ["ALL"] and not host.get("Privileged")
        assert host["SecurityOpt"] == ["no-new-privileges"] and host["AutoRemove"] is True
        assert (
            host["Memory"] == host["MemorySwap"] == 512 << 20 and host["PidsLimit"] == 66 and host["NanoCpus"] == 10**9
        )
        assert host["Tmpfs"]["/work"].endswith("mode=1777,size=8m,nr_inodes=4096")
        assert {limit["Name"] for limit in host["Ulimits"]} == {"nofile", "core", "fsize", "cpu"}
        assert all(bind.endswith(":ro") for bind in host["Binds"])
        net = await sandbox.exec("(exec 3<>/dev/tcp/127.0.0.1/1) 2>&1; ls /proc | grep -c '^[0-9]'", 5.0)
        assert "refused" in net.output and int(net.output.split()[-1]) < 9
        await sandbox.close()

    with_daemon(tmp_path, body)


@needs_root
def test_a_lease_ends_after_its_lifetime_and_may_be_closed_after_that(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        sandbox = await pool.lease()
        with pytest.raises(InfrastructureFailure):
            await sandbox.exec("sleep 60", 60.0)
        with pytest.raises(InfrastructureFailure, match="lifetime_s"):
            await sandbox.exec("true", 1.0)
        await sandbox.close()

    started = time.monotonic()
    with_daemon(tmp_path, body, lifetime_s=1.5, warm=0)
    assert time.monotonic() - started < 20


@needs_root
def test_shell_tasks_are_graded_in_containers(tmp_path):
    async def body(pool: SandboxPool, fake: FakeDaemon) -> None:
        (task,) = build_source(TasksConfig(kinds=("fix",), size=1)).take(1)
        name, right = task.grading.taken[0], task.prompt.split()[-1]
        sandbox = await pool.lease(task.files)
        await sandbox.exec(f"echo 'expr $1 + {right}' > {name}", 5.0)
        assert await grade(task, sandbox, "done", pool, 10.0) == 1.0
        sandbox = await pool.lease(task.files)
        assert await grade(task, sandbox, "done", pool, 10.0) == 0.0

    with_daemon(tmp_path, body)


def test_no_daemon_is_refused_with_the_remedy_and_nothing_runs_on_the_host(tmp_path):
    pool = SandboxPool(SandboxConfig(backend="docker", docker_host=f"unix://{tmp_path}/none.sock"))
    started = time.monotonic()
    with pytest.raises(IsolationError, match="start dockerd, set sandbox.docker_host"):
        asyncio.run(pool.start())
    assert time.monotonic() - started < 5


def test_an_image_that_is_not_there_is_refused_and_never_pulled(tmp_path):
    with daemon(tmp_path) as (fake, address):
        pool = SandboxPool(SandboxConfig(backend="docker", docker_host=address))
        with pytest.raises(IsolationError, match=f"docker pull {IMAGE}"):
            asyncio.run(pool.start())
        assert not fake.created


def test_every_hole_of_a_container_is_named():
    good = "uid=1000\nCapPrm=Z\nCapEff=Z\nCapBnd=Z\nCapInh=Z\nNoNewPrivs=1\ninterfaces=0\nwritable= \nsockets=0\n"
    good = good.replace("Z", "0" * 16) + "work_kb=32768\n"
    assert judge(good, SandboxConfig()) == []
    for line, instead, words in (
        ("uid=1000", "uid=0", "uid 0"),
        ("CapBnd=0000000000000000", "CapBnd=00000000a80425fb", "capabilities"),
        ("interfaces=0", "interfaces=1", "1 network interfaces"),
        ("writable= ", "writable=/etc ", "/etc"),
        ("sockets=0", "sockets=1", "socket is visible"),
        ("work_kb=32768", "work_kb=9999999", "9999999 kB"),
    ):
        assert words in "; ".join(judge(good.replace(line, instead), SandboxConfig()))
    assert len(judge("", SandboxConfig())) == 7
