"""A file that cannot be written is refused before there is anything to write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megathunder.errors import UserError
from megathunder.metrics.output_file import output_file

ROOT = Path(__file__).resolve().parents[3]


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    new = tmp_path / "deep" / "out.json"
    assert output_file(new) == new and new.parent.is_dir() and not new.exists()
    new.write_text("kept")
    output_file(new)
    assert new.read_text() == "kept"


@pytest.mark.parametrize("name", ["folder", "file/out.json"])
def test_one_that_cannot_is_refused_with_a_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected: .*\n.*remedy"):
        output_file(tmp_path / name)


def test_a_tool_refuses_it_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "tools/simulate.py", "sweep", "--json", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Is a directory" in done.stderr and "Traceback" not in done.stderr
    assert json.dumps(str(tmp_path))[1:-1] in done.stderr
