"""What cores lose to each other, measured."""

from __future__ import annotations

import os

import pytest

from benchmarks.comparison import machine


def test_independence_is_the_mean_share_of_their_speed_that_both_sides_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = {((0,),): [100], ((1,),): [200], ((0,), (1,)): [50, 150]}
    monkeypatch.setattr(machine, "_work", lambda sets, seconds: rounds[tuple(map(tuple, sets))])
    assert machine.independence([0], [1]) == pytest.approx(0.625)


def test_work_on_a_core_is_counted() -> None:
    assert machine.independence([min(os.sched_getaffinity(0))], [max(os.sched_getaffinity(0))], 0.05) > 0
    assert machine.processor()
