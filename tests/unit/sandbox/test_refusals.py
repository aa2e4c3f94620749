"""What the sandbox refuses before it runs anything."""

from __future__ import annotations

import asyncio
import time

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import ConfigError, IsolationError
from megathunder.sandbox import ExecResult, SandboxPool
from megathunder.sandbox.local import LocalSandbox, joined
from megathunder.sandbox.probe import judge

GOOD = """network=closed
host_file=hidden
processes=3
uid=5000
CapInh=0000000000000000
CapPrm=0000000000000000
CapEff=0000000000000000
CapBnd=0000000000000000
NoNewPrivs=1
Seccomp=2
namespace=refused
nproc=64
memory_kb=524288
work_kb=32768
"""


def test_missing_bubblewrap_is_refused_at_once_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    started = time.monotonic()
    with pytest.raises(IsolationError, match="apt-get install bubblewrap"):
        asyncio.run(SandboxPool(SandboxConfig()).start())
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("line", "instead", "complaint"),
    [
        ("network=closed", "network=open", "network is reachable"),
        ("host_file=hidden", "host_file=visible", "files of the host"),
        ("processes=3", "processes=120", "120 processes"),
        ("uid=5000", "uid=0", "uid 0"),
        ("CapEff=0000000000000000", "CapEff=00000000a80425fb", "capabilities"),
        ("NoNewPrivs=1", "NoNewPrivs=0", "privileges"),
        ("Seccomp=2", "", "seccomp"),
        ("namespace=refused", "namespace=new\nwritten=/usr/.probe", "namespaces"),
        ("nproc=64", "nproc=unlimited", "unlimited"),
        ("work_kb=32768", "work_kb=99999999", "99999999"),
    ],
)
def test_every_hole_is_named(line: str, instead: str, complaint: str) -> None:
    assert judge(GOOD, SandboxConfig(), 5000) == []
    assert complaint in "; ".join(judge(GOOD.replace(line, instead), SandboxConfig(), 5000))


def test_missing_answers_count_as_holes() -> None:
    assert len(judge("", SandboxConfig(), 5000)) >= 10


def test_more_sandboxes_than_uids_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_open is 4000"):
        SandboxPool(SandboxConfig(max_open=4000))


def test_a_command_that_a_limit_ended_says_so_to_the_policy() -> None:
    result = ExecResult(output="busy\n", exit_status=137, wall_s=1.0, cpu_s=0.0, fault="timeout")
    assert result.notice == "stopped: timeout" and result.timed_out
    assert ExecResult(output="ok\n", exit_status=0, wall_s=0.0, cpu_s=0.0).notice == ""


def test_dropped_bytes_are_counted_between_head_and_tail() -> None:
    assert joined(b"headtail", 4, 7) == "head\n... 7 bytes dropped ...\ntail"
    assert joined(b"\xf0", 1, 0) == "\ufffd"


def test_a_command_that_is_too_long_is_not_run_in_part() -> None:
    sandbox = LocalSandbox(SandboxConfig(), 0)  # not started: nothing can run
    result = asyncio.run(sandbox.exec(": " + "x" * 152_000, 1.0))
    assert result.exit_status == 126 and result.notice.startswith("not run: a command of 152,002 bytes")
