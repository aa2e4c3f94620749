"""The page says what the rows say, needs nothing outside itself, and admits staleness."""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from megathunder.config import Config
from megathunder.metrics.resumptions import ResumedAt, note_resumption
from megathunder.metrics.row import MetricsRow, Salt
from megathunder.metrics.spans import Span, read_spans
from megathunder.report import curves
from megathunder.report import panels as feature_panels
from megathunder.report.html_page import certificate, page
from megathunder.report.html_report import build_report
from megathunder.report.panels import features
from megathunder.report.timeline import gaps, last_updates, rows_for
from megathunder.tracing import Recorder
from tests.unit.metrics.made_run import everything, made_row, made_run


def shaded(text: str) -> list[str]:
    """Fills of the stretches without a step."""
    return re.findall(r"fill: #c0362c; opacity: 0.13", text)


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


def test_a_report_shows_what_a_run_used_and_nothing_else(tmp_path: Path) -> None:
    plain = build_report(made_run(tmp_path / "plain", updates=6)).read_text()
    every = build_report(made_run(tmp_path / "every", updates=6, used=True)).read_text()
    found = Resources()
    found.feed(every)
    assert found.tags.count("svg") == 5 and found.fetched == []
    for words in (
        "(SAGC)",
        "Size chosen: 4 in 2, 8 in 3, 16 in 1 updates. 9 of 60 groups",
        "(15.0%; the target is 30.0%",
        "price of a straggler",
        "(SALT)",
        "Coefficients were reweighed in",
        "by 1.3 at most",
        "Drafts from earlier trajectories (suffix)",
        "of 5,700 drafted tokens came true (50.0%)",
        "routing.policy = cache_aware on 2 server(s): 47.5% of the 120,000 tokens",
    ):
        assert words in every, words
        assert words not in plain, words


def test_curves_of_a_feature_go_through_the_numbers_of_the_rows() -> None:
    rows = [made_row(update, **everything(update)) for update in range(4)]
    sized = [(row.update, row.sizing) for row in rows]
    axes = Figure().subplots()
    feature_panels._stragglers(axes, sized, 0.3)
    assert list(axes.lines[0].get_ydata()) == [3 / 8, 3 / 24, 4 / 40, 6 / 48]
    axes = Figure().subplots()
    feature_panels._risks(axes, sized)
    alpha, beta = rows[3].sizing.posterior[8]
    assert [line.get_label() for line in axes.lines] == ["4", "8", "16"]
    assert axes.lines[1].get_ydata()[3] == alpha / (alpha + beta)


def test_salt_that_reweighed_nothing_says_so() -> None:
    salt = Salt(geometries=3, cancellation=0.1, cancellation_max=0.22, factor=1, factor_max=1, rank=1, spectrum=(0.6,))
    settings = dataclasses.replace(Config().salt, amplification=1.0)
    (found,) = features(dataclasses.replace(Config(), salt=settings), [made_row(0, salt=salt)])
    assert found.words.startswith(
        "The greatest cancellation was 0.220. Nothing was reweighed (it is severe from 0.5 on)"
    )


def test_the_reward_has_no_legend_of_what_was_not_evaluated() -> None:
    def legend(rows: list[MetricsRow]) -> list[str]:
        axes = Figure().subplots()
        curves._reward(axes, rows)
        return [text.get_text() for text in axes.get_legend().get_texts()]

    assert legend([made_row(update) for update in range(3)]) == ["training"]
    assert legend([made_row(update) for update in range(12)]) == ["training", "held-out"]


def test_each_eigenvalue_has_a_name() -> None:
    axes = Figure().subplots()
    feature_panels._spectrum(axes, [(update, made_row(**everything(update)).salt) for update in range(3)])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1", "2", "3"]
    assert len({line.get_color() for line in axes.lines}) == 3


@pytest.mark.parametrize(
    ("updates", "names"),
    [
        (1, ["reward of the update"]),
        (3, ["reward, first update", "reward, last update"]),
        (7, ["reward, first three updates", "reward, last three updates"]),
        (40, ["reward, first four updates", "reward, last four updates"]),
    ],
)
def test_rewards_of_both_ends_are_of_updates_that_there_were(updates: int, names: list[str]) -> None:
    text = page(Config(), [made_row(update) for update in range(updates)], curves="", timeline_base64="")
    assert re.findall(r"<span>(reward[^<]*)</span>", text) == names


def test_servers_that_went_down_are_told(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=6)
    assert "went down" not in build_report(folder).read_text()
    recorder = Recorder(folder.events)
    for lane, name in (("server-1", "down"), ("server-1", "ready"), ("server-1", "down"), ("server-1", "lost")):
        recorder.write(lane, name, 101.0, 101.0)
    recorder.write("server-0", "down", 102.0, 102.0)
    recorder.close()
    told = "Servers that went down since the last start: server-0 once (restarted), server-1 twice (lost)."
    assert told in build_report(folder).read_text()


def test_settings_that_a_resumed_run_changed_are_in_its_report(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=6)
    assert "resumed run changed" not in build_report(folder).read_text()
    note_resumption(folder.resumptions, ResumedAt(update=4, changed=("run.group_size: 8 -> 4",)))
    assert "<td>4</td><td>run.group_size</td><td>8 -&gt; 4</td>" in build_report(folder).read_text()


def test_updates_without_a_step_are_told_with_their_reasons(tmp_path: Path) -> None:
    assert "step</b>" not in build_report(made_run(tmp_path / "all", updates=6)).read_text()
    text = build_report(made_run(tmp_path / "some", updates=6, idle=(1, 2, 5))).read_text()
    assert "3 of 6 updates took no optimizer step" in text
    assert "no contribution has a coefficient other than 0 (3)" in text
    assert '<tr class="nostep" title="no contribution' in text and text.count("<tr class=") == 3
    assert f"<b>{3 * 2656:,}</b><span>trained tokens" in text, "those of the other three"
    assert "192 dropped (equal_rewards 192)" in text
    assert len(shaded(text)) == 2 * 6, "updates 1 and 2 are one stretch, in each"


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
