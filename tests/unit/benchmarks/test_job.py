"""A job that a tool started ends with the tool, which says what it was told."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.comparison import job as jobs
from benchmarks.comparison.alternation import Recording
from megathunder.config import Config
from megathunder.errors import UserError

TOOL = """
import signal, sys
from benchmarks.comparison import job
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


@pytest.mark.parametrize("words", [("--run.folder", "there"), ("--run.updates=2",), ("--schedule", "sync")])
def test_what_the_tool_settles_is_not_settled_twice(words, monkeypatch):
    monkeypatch.setattr(jobs, "_wait_for", lambda _: pytest.fail("the job began"))
    with pytest.raises(UserError, match="settled by this tool") as refused:
        jobs.run_job(Config(), ranks=1, settings=("--learner.learning_rate", "1e-5", *words))
    assert "--help" in refused.value.remedy


def test_a_number_out_of_its_range_is_refused_before_the_job_begins(monkeypatch):
    monkeypatch.setattr(jobs, "_wait_for", lambda _: pytest.fail("the job began"))
    with pytest.raises(UserError, match="--speed 0"):
        Recording(run="", speed=0.0)
    with pytest.raises(UserError, match="learning_rate = nan"):
        jobs.run_job(Config(), ranks=1, settings=("--learner.learning_rate", "nan"))
    with pytest.raises(UserError, match="unknown option --learner.learning_rates"):
        jobs.run_job(Config(), ranks=1, settings=("--learner.learning_rates", "1"))
