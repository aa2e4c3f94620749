"""Ctrl-C under plain torchrun, at three moments; tests/integration/interruptions.py tries twenty."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from interruptions import UPDATES, interrupt, resume


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [6.0, 14.0, 20.0])
def test_ctrl_c_says_what_was_done_leaves_nothing_running_and_the_run_goes_on(tmp_path: Path, after_s: float) -> None:
    outcome = interrupt(tmp_path, signal.SIGINT, after_s)
    assert not outcome.faults(), (outcome.faults(), outcome.output)
    if outcome.checkpoint and outcome.updates < UPDATES:
        assert resume(tmp_path) == (0, UPDATES)
