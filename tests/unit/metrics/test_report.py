"""The page says what the rows say, needs nothing outside itself, and admits staleness."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megathunder.config import Config
from megathunder.metrics.page import certificate, page
from megathunder.metrics.report import build_report
from megathunder.metrics.spans import Span, read_spans
from megathunder.metrics.timeline import gaps, last_updates, rows_for
from tests.unit.metrics.made_run import made_row, made_run

seconds = st.floats(0, 100, allow_nan=False)
intervals = st.lists(st.tuples(seconds, seconds).map(lambda pair: (min(pair), max(pair))), max_size=12)


class Resources(HTMLParser):
    """Whatever a page would fetch, and the tags it has."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and value and not value.startswith(("data:", "#")):
                self.fetched.append(value)


def test_the_report_is_one_file_with_curves_timeline_and_tables(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=12)
    text = build_report(folder).read_text()
    found = Resources()
    found.feed(text)
    assert found.fetched == []
    assert "script" not in found.tags
    assert found.tags.count("svg") == 1
    assert found.tags.count("table") > 10
    assert "data:image/png;base64," in text
    for words in ("Zero staleness.", "held-out", "thundersync", "max_open_groups", "step wall"):
        assert words in text
    assert len(text) < 1_000_000
    width, height = Image.open(folder.timeline).size
    assert width > 2 * height


def test_a_run_of_one_update_has_a_report_without_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = build_report(made_run(tmp_path, updates=1, cells=1)).read_text()
    assert "All 2,656 sampled tokens of 1 updates" in text


def test_a_run_without_events_still_has_a_report(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=5)
    folder.events.unlink()
    assert "No events were recorded." in build_report(folder).read_text()


def test_the_certificate_is_refused_for_a_single_stale_token() -> None:
    exact = [made_row(0), made_row(1)]
    assert "Zero staleness." in certificate(exact)
    stale = certificate([*exact, made_row(2, tokens_by_lag={0: 2655, 1: 1}, policy_lag_max=1)])
    assert "Not exact." in stale
    assert "1 of 7,968" in stale


def test_settings_are_escaped_and_keys_are_not_shown() -> None:
    config = Config()
    config = dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name="<b>x"),
        rollout=dataclasses.replace(config.rollout, api_key="hidden-key"),
    )
    text = page(config, [made_row(0)], curves="", timeline_base64="")
    assert "<b>x" not in text
    assert "hidden-key" not in text
    assert re.search(r"api_key</td><td>\(set\)", text)


@given(intervals)
def test_gaps_and_busy_time_cover_the_window_once(busy: list[tuple[float, float]]) -> None:
    free = gaps(busy, 10.0, 90.0)
    assert all(10 <= begin <= end <= 90 for begin, end in free)
    inside = [(max(b, 10.0), min(e, 90.0)) for b, e in busy if e > 10 and b < 90]
    for instant in [10.5, 33.3, 50.0, 89.5, *(b + 1e-7 for b, _ in inside)]:
        covered = any(b <= instant < e for b, e in inside)
        idle = any(b <= instant < e for b, e in free)
        assert covered != idle or not 10 <= instant < 90


@given(intervals)
def test_rows_never_overlap_and_are_as_few_as_run_at_once(busy: list[tuple[float, float]]) -> None:
    spans = [Span(lane="l", name="n", start_s=b, end_s=e) for b, e in sorted(busy) if e > b]
    rows = rows_for(spans)
    for row in set(rows):
        mine = [span for span, at in zip(spans, rows, strict=True) if at == row]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
    at_once = max((sum(s.start_s <= t.start_s < s.end_s for s in spans) for t in spans), default=0)
    assert len(set(rows)) == at_once


def test_the_window_holds_whole_updates_only(tmp_path: Path) -> None:
    spans = read_spans(made_run(tmp_path, updates=8).events)
    unfinished = [*spans, Span(lane="update", name="rollout", start_s=1e4, end_s=1e4 + 1, attributes={"update": 8})]
    window = last_updates(unfinished, 2)
    assert window is not None
    assert window.updates == (6, 7)
    assert last_updates([], 2) is None
