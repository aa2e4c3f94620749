"""Attacks on the sandbox: each is contained, is an error for the agent, and leaves the host and the pool unharmed.

Every attack runs inside a sandbox whose limits the pool's own probe has measured just before.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rewards.artifacts import take_folder
from megathunder.sandbox import ExecResult, SandboxPool
from megathunder.tasks import TaskFile

CONFIG = SandboxConfig(memory_mb=256, disk_mb=8, inodes=2000, warm=1)
Result = TypeVar("Result")


def with_pool(body: Callable[[SandboxPool], Awaitable[Result]], config: SandboxConfig = CONFIG) -> Result:
    """Runs `body` with a started pool and asserts that nothing outlives it."""

    async def whole() -> Result:
        pool = SandboxPool(config)
        await pool.start()
        try:
            result = await body(pool)
            assert pool.leaks() == []
            return result
        finally:
            await pool.close()
            assert pool.leaks() == []

    return asyncio.run(whole())


def attack(command: str, deadline_s: float = 5.0) -> ExecResult:
    """The result of one command; the sandbox must still work after it."""

    async def body(pool: SandboxPool) -> ExecResult:
        sandbox = await pool.lease()
        result = await sandbox.exec(command, deadline_s)
        after = await sandbox.exec("rm -rf /work/* /tmp/* /dev/shm/*; echo alive", 5.0)
        assert after.output == "alive\n"
        await sandbox.close()
        return result

    return with_pool(body)


def test_no_connection_reaches_the_host_or_the_network() -> None:
    listener, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    name = f"sandbox-attack-{os.getpid()}"
    abstract.bind(f"\0{name}")
    abstract.listen()
    port = listener.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), 1).close()  # the host itself can connect
    unix = f"socket(S, 1, 1, 0) or die; print connect(S, pack('S a*', 1, qq(\\0{name}))) ? 'OPEN' : 'no'"
    result = attack(
        f"for at in tcp/127.0.0.1/{port} tcp/192.0.2.1/80 udp/192.0.2.1/53; do"
        f'  (exec 3<>/dev/$at && echo hello >&3 && echo OPEN $at); done 2>/dev/null; perl -e "{unix}"'
    )
    listener.close()
    abstract.close()
    assert "OPEN" not in result.output and result.output.endswith("no")


def test_files_of_the_host_are_invisible_and_nothing_else_is_writable(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret of the host")
    result = attack(
        f"cat {tmp_path}/secret /etc/shadow /proc/1/root{tmp_path}/secret; ls /root /home /srv /var;"
        "for p in / /usr /etc /bin /dev /proc/sys/kernel /usr/bin; do (: > $p/x) && echo WROTE $p; done;"
        "(: > /proc/sysrq-trigger) && echo WROTE sysrq; for d in /dev/vda /dev/mem /dev/kmsg /dev/kvm; do"
        "  (: < $d) && echo OPENED $d; done; cat /etc/passwd"
    )
    assert "secret of the host" not in result.output
    assert "WROTE" not in result.output and "OPENED" not in result.output
    assert result.output.count(":x:") == 2  # the sandbox's own passwd


def test_processes_of_the_host_are_invisible_and_cannot_be_killed() -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        result = attack(f"kill -9 {victim.pid} && echo KILLED; ls -d /proc/[0-9]* | wc -l")
        assert victim.poll() is None
        assert "KILLED" not in result.output
        assert int(result.output.split()[-1]) < 10
    finally:
        victim.kill()
        victim.wait()


@pytest.mark.parametrize(
    "bomb",
    [
        ":(){ :|:& };:; sleep 20",
        "perl -e 'while (1) { my $p = fork; if (defined $p && !$p) { setpgrp; } }'",
    ],
)
def test_fork_bomb_stops_at_the_process_limit(bomb: str) -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        limit = await sandbox.exec("ulimit -Hu", 5.0)
        assert limit.output.strip() == "64"  # never run the bomb without it
        running = asyncio.create_task(sandbox.exec(bomb, 1.5))
        peak = 0
        while not running.done():
            await asyncio.sleep(0.1)
            peak = max(peak, len(pool.leaks()))
        assert (await running).timed_out
        assert 10 < peak <= 64 or os.geteuid() != 0
        assert pool.leaks() == []
        assert (await sandbox.exec("echo alive", 5.0)).output == "alive\n"
        await sandbox.close()

    with_pool(body)


def test_one_process_cannot_take_more_memory_than_the_limit() -> None:
    result = attack("perl -e '$x = q(a) x (1 << 30); print q(GOT IT)'")
    assert "GOT IT" not in result.output and result.exit_status != 0


def test_many_processes_cannot_take_more_memory_than_the_limit_together() -> None:
    result = attack("for i in $(seq 20); do perl -e '$x = q(a) x (60 << 20); sleep 20' & done; wait", 10.0)
    assert result.fault == "memory"


def test_writing_ten_gigabytes_stops_at_the_size_of_the_folder() -> None:
    for folder, size_mb in (("/work", 8), ("/tmp", 16), ("/dev/shm", 4)):
        result = attack(f"dd if=/dev/zero of={folder}/big bs=1M count=10240; stat -c %s {folder}/big", 20.0)
        assert "No space left" in result.output or "File too large" in result.output
        assert int(result.output.split()[-1]) <= size_mb << 20


def test_making_files_without_end_is_stopped() -> None:
    result = attack("perl -e 'for (1 .. 3000000) { open(F, q(>), q(/tmp/f) . $_) or die }'", 20.0)
    assert result.fault == "files"


def test_flood_of_output_is_cut_and_counted() -> None:
    result = attack("echo first; yes abcdefgh", 1.0)
    assert result.timed_out and result.wall_s < 5
    assert len(result.output) < CONFIG.output_bytes + 100
    assert result.dropped_bytes > 1 << 20
    assert result.output.startswith("first\n") and f"... {result.dropped_bytes} bytes dropped ..." in result.output


def test_daemons_and_ignored_signals_do_not_survive_their_command() -> None:
    daemon = "perl -e 'use POSIX; exit if fork; setsid; exit if fork; $SIG{$_} = q(IGNORE) for keys %SIG; sleep 300'"

    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        for command in (f"{daemon}; echo up", "(setsid sleep 300 &); echo up"):
            started = time.monotonic()
            assert (await sandbox.exec(command, 5.0)).output == "up\n"
            assert time.monotonic() - started < 10
            assert pool.leaks() == []
        stubborn = await sandbox.exec("trap '' TERM INT HUP; sleep 100 & while :; do sleep 1; done", 0.5)
        assert stubborn.timed_out and stubborn.wall_s < 5 and pool.leaks() == []
        await sandbox.close()

    with_pool(body)


def test_supervisor_cannot_be_killed_stopped_read_or_impersonated() -> None:
    result = attack(
        "kill -9 1; kill -STOP 1; kill -9 -1; prlimit --pid 1 --cpu=1:1; cat /proc/1/mem; ls /proc/1/fd;"
        "for fd in 3 4 5 6 7 8 9; do (echo forged >&$fd); done; echo end"
    )
    assert result.output.endswith("end\n") and result.exit_status == 0


def test_kernel_doors_are_shut() -> None:
    calls = {"unshare": (272, 0x10000000), "mount": (165, 0), "ptrace": (101, 0), "bpf": (321, 0), "keyctl": (250, 0)}
    calls |= {"io_uring_setup": (425, 1), "perf_event_open": (298, 0), "memfd_create": (319, 0), "setns": (308, 0)}
    if os.uname().machine != "x86_64":
        calls = {"unshare": (97, 0x10000000), "mount": (40, 0), "ptrace": (117, 0), "bpf": (280, 0)}
    script = "; ".join(f"print qq({n} ), syscall({number}, {a}, 0, 0, 0, 0), qq( )" for n, (number, a) in calls.items())
    vsock = "; print socket(S, 40, 1, 0) ? q(VSOCK) : q(shut)"
    result = attack(f"perl -e '{script}{vsock}'")
    assert result.output == "".join(f"{name} -1 " for name in calls) + "shut"


def test_bytes_that_are_not_text_become_replacement_characters() -> None:
    assert attack(r"printf '\xf0'").output == "\ufffd"
    assert attack(r"printf '\xff\x00caf\xe9\n'").output == "\ufffd\0caf\ufffd\n"


def test_output_is_counted_to_the_byte_and_decoded_across_writes() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        for written in (2048, 2049, 70000):
            long = await sandbox.exec(f"printf '<%{written - 2}s>' ''", 5.0)
            assert long.dropped_bytes == max(0, written - 2048)
            assert long.output.startswith("< ") and long.output.endswith(" >")
            assert ("bytes dropped" in long.output) == (written > 2048)
        split = await sandbox.exec(
            r"printf 'caf\xc3'; sleep 0.2; printf '\xa9 \xe2\x82'; sleep 0.1; printf '\xac\xf0'", 5.0
        )
        assert split.output == "caf\u00e9 \u20ac\ufffd" and split.dropped_bytes == 0
        torn = await sandbox.exec(r"for i in $(seq 1500); do printf '\xc3\xa9'; done", 5.0)
        assert torn.dropped_bytes == 3000 - 2048 and torn.output.count("\u00e9") == 1024
        await sandbox.close()

    with_pool(body, replace(CONFIG, output_bytes=2048))


def test_wall_time_and_cpu_time_are_those_of_the_command_and_its_children() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        slept = await sandbox.exec("sleep 0.5", 5.0)
        burnt = await sandbox.exec("(i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done) & wait; exit 7", 20.0)
        assert slept.wall_s >= 0.5 and slept.cpu_s < 0.2
        assert 0.1 < burnt.cpu_s <= burnt.wall_s + 0.1 and burnt.exit_status == 7
        assert (await sandbox.exec("kill -11 $$", 5.0)).exit_status == 128 + 11
        await sandbox.close()

    with_pool(body)


@pytest.mark.parametrize(
    ("command", "timed_out"),
    [
        ("exec <&- >&- 2>&-; sleep 60", True),
        ("exec >&- 2>&-; (setsid sleep 60 &); exit 0", False),
        ("for i in 1 2 3; do (while :; do :; done) & done; exit 0", False),
        ("yes & (while :; do setsid true; done) & wait", True),
    ],
)
def test_a_command_ends_within_its_time_with_no_survivor_whatever_it_does_to_its_streams(
    command: str, timed_out: bool
) -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        started = time.monotonic()
        assert (await sandbox.exec(command, 1.0)).timed_out == timed_out
        assert time.monotonic() - started < 10 and pool.leaks() == []
        await sandbox.close()

    with_pool(body)


def test_links_of_an_agent_lead_uploads_and_downloads_nowhere() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        links = "echo mine > real; ln -s real file; ln -s /usr/bin folder; ln -s /proc/1/environ env; ln -s loop loop"
        await sandbox.exec(f"{links}; ln real hard", 5.0)
        await sandbox.upload([TaskFile(path="file", content="given\n")])
        assert (
            await sandbox.exec("cat real file; [ -L file ] || echo replaced", 5.0)
        ).output == "mine\ngiven\nreplaced\n"
        for path in ("folder/x", "../usr/x", "/etc/x"):
            with pytest.raises(InfrastructureFailure, match="cannot write"):
                await sandbox.upload([TaskFile(path=path, content="x")])
        for path in ("env", "loop", "/proc/1/mem", "../etc/shadow", "/dev/zero"):
            assert await sandbox.download(path, 100) is None
        await sandbox.close()

    with_pool(body)


def test_hooks_of_an_agents_repository_run_nowhere_but_in_its_sandbox() -> None:
    """What is taken of a sandbox brings no .git, so no hook or setting of it meets the host or the grader."""

    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        hook = "printf '#!/bin/sh\\nid -u > /work/ran\\n' > .git/hooks/post-commit; chmod +x .git/hooks/post-commit"
        git = "git -c user.name=a -c user.email=a@example.invalid"
        await sandbox.exec(f"git init -q; {hook}; git config core.fsmonitor ./evil; echo 1 > a; git add a", 5.0)
        await sandbox.exec(f"{git} commit -qm x; mkdir -p sub; cp -r .git sub/.git", 5.0)
        taken = await take_folder(sandbox, "")
        assert "a" in taken and not [path for path in taken if ".git" in path.split("/")]
        await sandbox.close()

    with_pool(body)


def test_sixty_four_sandboxes_at_once_do_not_see_each_other() -> None:
    async def episode(pool: SandboxPool, number: int) -> None:
        sandbox = await pool.lease([TaskFile(path="mine", content=str(number))])
        await all_open.wait()
        await sandbox.exec(f"echo {number} > /tmp/shared; echo {number} > /dev/shm/shared", 20.0)
        seen = await sandbox.exec(
            "cat mine /tmp/shared /dev/shm/shared; kill -9 -1; echo; ls -d /proc/[0-9]* | wc -l", 20.0
        )
        assert seen.output.split()[:2] == [f"{number}{number}", str(number)] and int(seen.output.split()[-1]) < 8
        await sandbox.close()

    async def body(pool: SandboxPool) -> None:
        await asyncio.gather(*(episode(pool, n) for n in range(64)))

    all_open = asyncio.Barrier(64)
    with_pool(body, replace(CONFIG, max_open=64, max_running=8))


def test_no_mount_folder_or_cgroup_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[int, list[str], list[str]]:
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        groups = sorted(p.name for p in group.iterdir() if p.is_dir()) if group.is_dir() else []
        return len(Path("/proc/self/mountinfo").read_text().splitlines()), sorted(os.listdir(tmp_path)), groups

    async def body(pool: SandboxPool) -> None:
        sandboxes = await asyncio.gather(*(pool.lease([TaskFile(path="a", content="x")]) for _ in range(4)))
        await asyncio.gather(*(s.exec("cp a b; (sleep 60 &)", 5.0) for s in sandboxes))
        await sandboxes[0].close()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = state()
    with_pool(body)
    assert state() == before


def test_a_lease_is_over_after_its_lifetime_even_in_the_middle_of_a_command() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        started = time.monotonic()
        with pytest.raises(InfrastructureFailure):
            await sandbox.exec("sleep 60", 60.0)
        assert time.monotonic() - started < 10
        with pytest.raises(InfrastructureFailure, match="lifetime_s"):
            await sandbox.exec("true", 1.0)
        await sandbox.close()
        await sandbox.close()
        again = await pool.lease()  # its place is free
        assert (await again.exec("echo alive", 5.0)).output == "alive\n"
        await again.close()

    with_pool(body, replace(CONFIG, lifetime_s=1.5, max_open=1, warm=0))


def test_nothing_of_an_episode_is_left_for_the_next() -> None:
    dirt = (
        "echo x > a; mkdir -p d/e; echo x > d/e/f; chmod 000 d; ln -s /etc l; echo x > .hidden; touch -- '-rf' 'a b';"
        "echo x > /tmp/t; mkfifo /tmp/p; echo x > /dev/shm/s; (setsid sleep 100 &)"
    )

    async def body(pool: SandboxPool) -> None:
        for _ in range(4):
            sandbox = await pool.lease()
            left = await sandbox.exec("ls -A /work /tmp /dev/shm; ls -d /proc/[0-9]* | wc -l", 5.0)
            assert left.output.replace("\n", " ").split()[:3] == ["/dev/shm:", "/tmp:", "/work:"]
            assert (await sandbox.exec(dirt, 5.0)).exit_status == 0
            await sandbox.close()

    with_pool(body)


def test_killed_sandbox_is_a_fault_of_the_machinery_and_the_pool_serves_on() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        running = asyncio.create_task(sandbox.exec("sleep 20", 30.0))
        await asyncio.sleep(0.3)
        sandbox._sandbox._process.kill()
        with pytest.raises(InfrastructureFailure):
            await asyncio.wait_for(running, 5)
        await sandbox.close()
        again = await pool.lease()
        assert (await again.exec("echo alive", 5.0)).output == "alive\n"
        await again.close()

    with_pool(body, SandboxConfig(warm=0))


def test_abandoned_command_ends_with_its_sandbox() -> None:
    async def body(pool: SandboxPool) -> None:
        sandbox = await pool.lease()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.exec("sleep 100", 100.0), 0.3)
        await sandbox.close()
        await sandbox.close()
        deadline = time.monotonic() + 3
        while pool.leaks() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    with_pool(body)
