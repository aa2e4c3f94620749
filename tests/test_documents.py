"""README, CONTRIBUTING, SECURITY and docs/ name paths and settings that exist; the site builds without a warning."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megathunder.config.toml import settings

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES]
PATH = re.compile(r"(?<![\w/.-])(?:tools|examples|tests|docs|benchmarks|megathunder)/[\w./-]+")
MADE = ("examples/policies/student_large", "examples/policies/student_moe")
"""What the set-up makes."""
NOT_A_SETTING = {"py", "jsonl", "md", "toml", "json", "html"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_in_the_documents_exists(name: str) -> None:
    named = {path.rstrip(".") for path in PATH.findall((ROOT / name).read_text())} - set(MADE)
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, f"{name} names what is not there: {missing}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_setting_in_the_documents_exists(name: str) -> None:
    sections = {setting.partition(".")[0] for setting in settings() if "." in setting}
    named = re.findall(r"`(\w+)\.(\w+)`", (ROOT / name).read_text())
    wrong = [f"{a}.{b}" for a, b in named if a in sections and b not in NOT_A_SETTING and f"{a}.{b}" not in settings()]
    assert not wrong


def test_every_room_is_on_the_architecture_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [path.parent.name for path in (ROOT / "megathunder").glob("*/__init__.py")]
    assert not [name for name in rooms if f"`{name}/" not in text]


def test_every_page_is_in_the_navigation() -> None:
    text = yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert not [page for page in PAGES if Path(page).name not in text]


def test_generated_pages_are_current() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["PAGES"]
    stale = [name for name, write in pages.items() if (ROOT / "docs" / name).read_text() != write()]
    assert not stale, f"run: python docs/make_reference.py ({', '.join(stale)})"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "quickstart" / "index.html").exists()
