"""The release model: its closed form, its bounds, and its agreement with replay through the schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megathunder.errors import UserError
from megathunder.simulator.release_model import (
    Release,
    ReleaseCurve,
    lognormal_midpoints,
    speedup,
    tail_bounds,
    trajectory_releases,
    turn_releases,
)

RELEASES = st.lists(
    st.builds(Release, st.floats(0, 1), st.floats(0.01, 10)), min_size=1, max_size=40
)  # not normalised: the last release may come before the rollout ends


@given(RELEASES, st.floats(0.01, 10))
@settings(max_examples=300)
def test_tail_lies_between_the_service_excess_and_that_plus_rho_times_discrepancy(releases, rho) -> None:
    curve = ReleaseCurve(releases)
    least, greatest = tail_bounds(rho, curve.discrepancy)
    assert least - 1e-9 <= curve.tail(rho) <= greatest + 1e-9


@given(RELEASES, st.floats(0.01, 10))
@settings(max_examples=200)
def test_closed_form_equals_a_work_conserving_queue(releases, rho) -> None:
    total = sum(r.work for r in releases)
    now = 0.0
    for release in sorted(releases, key=lambda r: r.at):
        now = max(now, release.at) + rho * release.work / total
    assert ReleaseCurve(releases).tail(rho) == pytest.approx(max(now, 1.0) - 1.0, abs=1e-9)


@given(RELEASES, st.floats(0.01, 10), st.floats(0, 1))
def test_speedup_is_at_most_two_and_at_least_one(releases, rho, suffix) -> None:
    got = speedup(rho, ReleaseCurve(releases).tail(rho), suffix)
    assert 1.0 - 1e-9 <= got <= 2.0 + 1e-9


@given(st.integers(1, 400), st.floats(0.01, 10))
def test_uniform_release_gives_the_service_excess_and_midpoints_err_by_at_most_half_a_step(n, rho) -> None:
    midpoints = ReleaseCurve([Release((i + 0.5) / n, 1.0) for i in range(n)])
    assert midpoints.discrepancy <= 1 / (2 * n) + 1e-12
    assert midpoints.tail(rho) - max(rho - 1, 0) <= rho / (2 * n) + 1e-12


def test_full_overlap_doubles_the_speed_and_no_spread_gives_none() -> None:
    assert speedup(1.0, 0.0, 0.0) == 2.0
    curve = ReleaseCurve(trajectory_releases([1.0] * 8))
    assert curve.tail(1.0) == 1.0 and speedup(1.0, curve.tail(1.0), 0.0) == 1.0


def test_turns_shorten_the_tail_and_so_does_spread() -> None:
    narrow, wide = lognormal_midpoints(64, 0.1), lognormal_midpoints(64, 0.6)
    tail = {name: ReleaseCurve(trajectory_releases(d)).tail(1.0) for name, d in (("narrow", narrow), ("wide", wide))}
    assert tail["wide"] < tail["narrow"]
    assert ReleaseCurve(turn_releases(narrow, 10)).tail(1.0) < tail["narrow"]
    assert max(wide) == pytest.approx(1.0)


def test_releases_after_the_end_are_refused() -> None:
    with pytest.raises(UserError, match="releases"):
        ReleaseCurve([Release(1.5, 1.0)])
