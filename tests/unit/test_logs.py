"""Warnings of the package are shown whatever a library does to the root logger."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from megathunder.logs import configure_logging


@pytest.fixture
def restored() -> Iterator[None]:
    ours, root = logging.getLogger("megathunder"), logging.getLogger()
    before = (ours.handlers, ours.propagate, ours.level, root.level, root.handlers)
    yield
    ours.handlers, ours.propagate, root.handlers = before[0], before[1], before[4]
    ours.setLevel(before[2])
    root.setLevel(before[3])


def test_a_library_that_silences_the_root_logger_hides_no_warning_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restored: None
) -> None:
    configure_logging(tmp_path / "logs" / "warnings.log")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger().handlers.clear()
    logging.getLogger("megathunder.rollout.servers").warning("server 0 is down")
    logging.getLogger("another.library").warning("not ours")
    said = capsys.readouterr().err
    assert said == "WARNING megathunder.rollout.servers: server 0 is down\n"
    assert "server 0 is down" in (tmp_path / "logs" / "warnings.log").read_text()
