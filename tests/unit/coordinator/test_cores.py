"""Threads follow the work: shares, and processes that meet on a board."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megathunder.cores import CoreBoard, Role, board_path, open_board, remove_board, share_out


@given(cores=st.integers(1, 64), weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=12))
def test_shares_use_every_core_and_starve_nobody(cores, weights):
    shares = share_out(cores, weights)
    assert min(shares) >= 1
    assert sum(shares) == max(cores, len(weights))


@pytest.mark.parametrize(
    ("cores", "weights", "shares"),
    [(2, [1.0, 9.0], [1, 1]), (8, [1.0, 3.0], [2, 6]), (4, [0.0], [4]), (4, [0.0, 0.0], [2, 2]), (1, [1, 1], [1, 1])],
)
def test_shares_follow_the_balance_of_the_work(cores, weights, shares):
    assert share_out(cores, weights) == shares


@pytest.fixture
def board(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    return CoreBoard(tmp_path / "board", Role.LEARNER)


OTHER = """
import os, sys
from pathlib import Path
os.sched_getaffinity = lambda _: {0, 1}
from megathunder.cores import CoreBoard, Role
board = CoreBoard(Path(sys.argv[1]), Role.SERVER)
for line in sys.stdin:
    print(board.begin() if line.strip() == "begin" else board.end(), flush=True)
"""


@pytest.fixture
def server(tmp_path, board):
    command = [sys.executable, "-c", OTHER, str(tmp_path / "board")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(what):
            process.stdin.write(what + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        ask.process = process
        yield ask
        process.kill()


def test_a_learner_has_every_core_but_those_of_servers_that_compute(board, server):
    assert server("begin") == "1"
    assert board.begin() == 1
    assert server("begin") == "1"
    server("end")
    assert board.begin() == 2
    assert "learners 1" in board.describe() and "servers 1" in board.describe()
    board.end()
    assert server("begin") == "1"


def test_a_process_that_died_while_it_computed_takes_no_core(board, server, tmp_path):
    server("begin")
    server.process.kill()
    server.process.wait()
    assert board.begin() == 2
    again = CoreBoard(tmp_path / "board", Role.SERVER)
    assert again._slot == 1  # the dead one's


def test_a_board_that_cannot_be_used_leaves_threads_as_they_are(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert open_board(str(tmp_path / "link"), Role.SERVER) is None
    assert open_board("", Role.SERVER) is None
    assert board_path(tmp_path) != board_path(tmp_path / "other")
    remove_board(tmp_path / "absent")
