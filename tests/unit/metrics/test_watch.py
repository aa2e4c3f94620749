"""Memory: processes are told apart by what they are, peaks belong to phases, a row takes what is new."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from megathunder.metrics import resource_monitor
from megathunder.metrics.resource_monitor import MemoryWatch, holders, learner_ranks
from megathunder.planning.memory import GpuUse
from megathunder.report.html_page import _memory
from tests.unit.metrics.made_run import made_row

HOLD = "import sys, time; held = bytearray(int(sys.argv[1])); print(len(held), flush=True); time.sleep(60)"


def hold(size: int, *words: str) -> subprocess.Popen:
    """A process that has `size` bytes and `words` on its command line."""
    process = subprocess.Popen([sys.executable, "-S", "-c", HOLD, str(size), *words], stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_processes_are_told_apart_by_what_they_are() -> None:
    server, other = hold(1, "sglang.launch_server"), hold(1)
    try:
        found = holders(frozenset([1]))
        assert (found[server.pid], found[other.pid]) == ("servers", "sandboxes")
        assert (found[1], found[psutil.Process().pid]) == ("learner", "coordinator")
    finally:
        for process in (server, other):
            process.kill()
            process.wait()


def test_peaks_are_of_the_phase_in_which_memory_was_held() -> None:
    seen = MemoryWatch(every_s=0)
    seen.enter("rollout")
    process = hold(80 << 20, "sglang")
    seen.sample()
    process.kill()
    process.wait()
    seen.enter("step")
    row = seen.add_memory(made_row())
    assert row.memory_peaks["rollout"]["servers"] > 80 << 20
    assert row.memory_peaks["step"].get("servers", 0) < 80 << 20
    assert row.host_memory_bytes > row.memory_peaks["step"]["coordinator"] // 2 > 10_000_000
    assert "rollout" not in seen.add_memory(made_row()).memory_peaks


def test_samples_are_taken_while_the_run_goes_on() -> None:
    seen = MemoryWatch(every_s=0.02)
    seen.start()
    process = hold(60 << 20, "sglang")
    time.sleep(0.3)
    process.kill()
    process.wait()
    row = seen.add_memory(made_row())
    seen.close()
    assert row.memory_peaks["rollout"]["servers"] > 60 << 20


def test_gpu_memory_is_told_by_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    use = GpuUse(
        memory_bytes=50, limit_bytes=80, utilisation=0.5, by_process={psutil.Process().pid: 30, 999_999_999: 20}
    )
    monkeypatch.setattr(resource_monitor, "gpu_use", lambda: use)
    row = MemoryWatch(every_s=0).add_memory(made_row())
    assert row.memory_peaks["rollout"]["gpu coordinator"] == 30
    assert row.memory_peaks["rollout"]["gpu others"] == 20
    assert (row.gpu_memory_bytes, row.gpu_utilisation) == (50, 0.5)
    assert row.host_memory_bytes > 1000


def test_ranks_of_torchrun_are_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]
    agent = SimpleNamespace(cmdline=lambda: ["python", "/x/torchrun"], children=lambda: ranks)
    monkeypatch.setattr(resource_monitor.psutil, "Process", lambda pid: SimpleNamespace(pid=11, parent=lambda: agent))
    assert learner_ranks() == {11, 12}
    agent.cmdline = lambda: ["bash"]
    assert learner_ranks() == {11}


def test_the_report_shows_the_peaks_of_all_updates() -> None:
    table = _memory([made_row(0), made_row(3)])
    assert "<td>servers</td><td>1.40</td><td>–</td>" in table
    assert "<td>learner</td><td>0.84</td><td>1.02</td>" in table
    assert _memory([made_row(0, memory_peaks=None)]) == ""
