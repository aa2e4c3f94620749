"""Whatever a message tells people to install exists."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[3]
EXTRA = re.compile(r"\.\[(\w+)\]|the (\w+) extra")
INSTALL = re.compile(r"pip install (?!--|-e|-r)([\w\[\]]+)")


def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """setup.py's extras."""
    given: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    return given["extras_require"]


def sources() -> dict[str, str]:
    files = [p for folder in ("megathunder", "tools", "examples") for p in sorted((ROOT / folder).rglob("*"))]
    texts = [p for p in files if p.suffix in (".py", ".sh", ".md") and "__pycache__" not in p.parts]
    return {str(p.relative_to(ROOT)): p.read_text() for p in [*texts, ROOT / "README.md"]}


def test_every_extra_that_a_message_names_is_declared_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    extras, named = declared(monkeypatch), set()
    for path, text in sources().items():
        found = {a or b for a, b in EXTRA.findall(text)}
        assert found <= extras.keys(), f"{path} names {found - extras.keys()}; setup.py has {sorted(extras)}"
        named |= found
    assert {"gpu", "parquet", "wandb"} <= named
    loose = [r for requirements in extras.values() for r in requirements if "==" not in r]
    assert not loose


def test_messages_name_extras_and_not_packages() -> None:
    found = {path: INSTALL.findall(text) for path, text in sources().items() if not path.endswith("METADATA")}
    assert not {path: names for path, names in found.items() if names}
