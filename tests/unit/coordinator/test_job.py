"""A job that a tool started ends with the tool, which says what it was told."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

TOOL = """
import signal, sys
from megathunder.coordinator import job
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run behind a shell's &
job.TERMINAL_S = 0.1
print(job._wait_for([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_job_outlives_its_tool(number):
    tool = subprocess.Popen([sys.executable, "-c", TOOL], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    job = psutil.Process(int(tool.stdout.readline()))
    tool.send_signal(number)
    killed = number == signal.SIGKILL
    assert tool.wait(20) == (-number if killed else 0)
    assert tool.stdout.read() == ("" if killed else f"({-number}, {int(number)})\n")
    deadline = time.monotonic() + 10
    while job.is_running() and job.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not job.is_running() or job.status() == psutil.STATUS_ZOMBIE
