"""The report in a real browser: its charts are drawn, nothing is fetched, the console stays silent.

The browser is Debian's: `MEGATHUNDER_BROWSER=1 bash tools/setup.sh`, which tests/run.sh does, installs it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from PIL import Image

from megathunder.report.html_report import build_report
from tests.integration.browser import Seen, find_browser, look_at
from tests.unit.metrics.made_run import made_run

pytestmark = pytest.mark.skipif(
    find_browser() is None and not os.environ.get("CI"),
    reason="no Chromium: MEGATHUNDER_BROWSER=1 bash tools/setup.sh installs it",
)

LOOK = """(() => {
  const box = e => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
  return {
    curves: [...document.querySelectorAll('section > svg')].map(box),
    axes: document.querySelectorAll('section > svg g[id^="axes_"]').length,
    lines: document.querySelectorAll('section > svg g[id^="line2d_"] path[clip-path]').length,
    pictures: [...document.images].map(i => [i.alt, i.complete, i.naturalWidth, ...box(i)]),
    rows: document.querySelectorAll('table.rows tr').length - 1,
    unstepped: document.querySelectorAll('tr.nostep').length,
    shaded: document.querySelectorAll('section > svg path[style*="opacity: 0.13"]').length,
    verdict: document.querySelector('.certificate .mark').textContent,
    title: document.title,
    overflow: [document.documentElement, ...document.querySelectorAll('section')]
      .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.tagName + ': ' + e.textContent.slice(0, 30)),
    closed: !document.querySelector('details').open,
  };
})()"""


def colours(picture: bytes) -> int:
    return len(set(Image.open(io.BytesIO(picture)).convert("RGB").resize((320, 600)).getdata()))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(made_run(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def seen(report: Path) -> Seen:
    return look_at(report, LOOK)


def test_the_charts_are_drawn(seen: Seen) -> None:
    found = seen.answer
    assert len(found["curves"]) == 1 and found["axes"] == 6
    assert all(width > 900 and height > 400 for width, height in found["curves"])
    assert found["lines"] >= 7
    ((name, complete, natural, width, height),) = found["pictures"]
    assert (name, complete) == ("timeline", True) and natural > 900 and width > 900 and height > 200
    assert found["rows"] == 20 and found["title"] == "made" and found["closed"]
    assert found["verdict"] == "Zero staleness."
    assert colours(seen.screenshot) > 200


def test_what_a_run_used_is_drawn_in_sections_of_its_own(tmp_path: Path) -> None:
    page = build_report(made_run(tmp_path, used=True, idle=(2, 3, 9)))
    seen = look_at(page, LOOK, height=3200)
    found = seen.answer
    assert len(found["curves"]) == 5 and found["axes"] == 6 + 4 + 3 + 3 + 2
    assert all(width > 900 and height > 200 for width, height in found["curves"])
    assert found["overflow"] == [] and seen.errors == []
    assert found["unstepped"] == 1 and found["shaded"] == (6 + 4 + 3 + 3 + 2) * 2
    assert colours(seen.screenshot) > 200


def test_the_console_is_silent_and_nothing_is_fetched(seen: Seen) -> None:
    assert seen.errors == []
    assert {address.partition(":")[0] for address in seen.requests} <= {"file", "data"}
    assert sum(address.startswith("file:") for address in seen.requests) == 1


def test_nothing_is_wider_than_the_window(seen: Seen, report: Path) -> None:
    assert seen.answer["overflow"] == []
    narrow = look_at(report, LOOK, width=800).answer["overflow"]
    assert [name for name in narrow if "Last updates" not in name] == []  # that table scrolls inside its frame


def test_a_broken_page_is_seen_to_be_broken(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text('<img alt="timeline" src="gone.png"><script>console.error("no data"); missing()</script>')
    found = look_at(page, "[...document.images].map(i => i.naturalWidth)")
    assert found.answer == [0]
    assert any("no data" in error for error in found.errors) and len(found.errors) >= 3
    assert colours(found.screenshot) < 120
