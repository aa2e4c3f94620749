"""A run folder belongs to one process at a time, whatever the second run asks for."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megathunder.config import Config
from megathunder.errors import UserError
from megathunder.metrics.run_folder import start_run

HOLD = """
import dataclasses, sys
from megathunder.config import Config
from megathunder.metrics.run_folder import start_run
config = Config()
start_run(dataclasses.replace(config, run=dataclasses.replace(config.run, folder=sys.argv[1], overwrite=True)))
print("held", flush=True)
sys.stdin.read()
"""


def with_folder(folder: Path) -> Config:
    config = Config()
    return dataclasses.replace(config, run=dataclasses.replace(config.run, folder=str(folder), overwrite=True))


def test_a_second_run_of_a_name_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None and first.stdin is not None
        assert first.stdout.readline().strip() == "held"
        rows = tmp_path / "run" / "metrics.jsonl"
        rows.write_text("{}\n")
        with pytest.raises(UserError, match=str(first.pid)):
            start_run(with_folder(tmp_path))
        assert rows.read_text() == "{}\n"
        first.stdin.close()
    start_run(with_folder(tmp_path))


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="run.folder"):
        start_run(with_folder(tmp_path / "file"))
