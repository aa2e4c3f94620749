"""Scripts of benchmarks/ and tools/ that no other test starts: what they import is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {"trl_side.py"}  # runs in the environment of another trainer


def test_every_script_finds_what_it_imports() -> None:
    files = [f for folder in ("benchmarks", "tools") for f in sorted((ROOT / folder).rglob("*.py"))]
    files = [file for file in files if file.name not in ELSEWHERE and file.name != "__init__.py"]
    code = "import runpy, sys\nfor file in sys.argv[1:]:\n    runpy.run_path(file, run_name='imported')"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert len(files) > 30 and done.returncode == 0, done.stderr[-2000:]
