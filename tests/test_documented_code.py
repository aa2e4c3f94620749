"""Code in the README and in docs/ works: TOML is valid, Python compiles, commands exist and their settings are legal.

A block below `<!-- needs a GPU -->` or `<!-- runs until stopped -->` is checked for its syntax alone. Training commands
are planned here (`--plan`); the same configurations train in tests/integration.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from megathunder.config.toml import from_table
from megathunder.launch import Ranks

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]+) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
ONLY_SYNTAX = ("needs a GPU", "runs until stopped")
MADE = ("examples/policies/student_large", "examples/policies/student_moe")


class Block(NamedTuple):
    page: str
    language: str
    code: str
    mark: str


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text()):
            name = f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}"
            found.append(Block(name, match["language"], match["code"], match["mark"] or ""))
    return [block for block in found if block.language in languages]


def named(found: list[Block]) -> list:
    return [pytest.param(block, id=block.page) for block in found]


@pytest.mark.parametrize("block", named(blocks("toml")))
def test_settings_are_legal(block: Block) -> None:
    from_table(tomllib.loads(block.code), block.page)


@pytest.mark.parametrize("block", named(blocks("python")))
def test_python_compiles(block: Block) -> None:
    compile(block.code, block.page, "exec")


@pytest.mark.parametrize("block", named(blocks("json")))
def test_rows_are_json(block: Block) -> None:
    for line in block.code.splitlines():
        json.loads(line)


@pytest.mark.parametrize("block", named(blocks("bash")))
def test_commands_exist_and_are_legal(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    syntax = subprocess.run(["bash", "-n"], input=block.code, text=True, capture_output=True)
    assert syntax.returncode == 0, syntax.stderr
    monkeypatch.chdir(ROOT)
    if block.mark in ONLY_SYNTAX:
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        files = [w for w in words if re.match(r"(tools|examples|benchmarks|tests)/", w) and not w.startswith(MADE)]
        assert all(Path(w).exists() for w in files), line
        if "tools/train.py" in words and "--help" not in words:
            plan([w for w in words[words.index("tools/train.py") + 1 :] if w not in ("--plan", "--run.resume")])


def plan(arguments: list[str]) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "train.py"))
    ranks = Ranks(rank=0, world=2 if any("_parallel" in a for a in arguments) else 1, local_rank=0)
    assert tool["plan"](arguments, ranks) == 0, arguments


def test_the_example_of_the_readme_scores_its_own_row() -> None:
    of_readme = {b.language: b.code for b in blocks("json", "python") if b.page.startswith("README.md")}
    scope: dict = {}
    exec(of_readme["python"], scope)  # noqa: S102 - the README is ours
    row = json.loads(of_readme["json"])
    assert scope["score"](f" {row['command']}\n", row, None) == {"right": 1.0}
    assert scope["score"]("ls", row, None) == {"right": 0.0}


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
