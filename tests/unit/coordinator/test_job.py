"""A job that a tool started ends with the tool."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

TOOL = """
import sys
from megathunder.coordinator import job
job._wait_for([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_job_outlives_its_tool(number):
    tool = subprocess.Popen([sys.executable, "-c", TOOL], stdout=subprocess.PIPE, text=True)
    job = psutil.Process(int(tool.stdout.readline()))
    tool.send_signal(number)
    assert tool.wait(20) == (128 + signal.SIGTERM if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 10
    while job.is_running() and job.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not job.is_running() or job.status() == psutil.STATUS_ZOMBIE
