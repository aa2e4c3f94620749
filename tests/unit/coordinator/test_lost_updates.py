"""An update that loses every trajectory for one reason ends the run; other losses do not."""

from __future__ import annotations

import pytest

from megathunder.coordinator.rollouts import Rollouts
from megathunder.errors import InfrastructureFailure
from megathunder.tasks import ExactAnswer, Task
from megathunder.types import TrajectoryId, TrajectoryLost

TASK = Task(id="t", kind="k", prompt="go", files=(), grading=ExactAnswer(answer="42"))


def lose(*reasons: str) -> Rollouts:
    rollouts = Rollouts(update=3, batch=3, policy_version=3, groups=[[TASK] * len(reasons)])
    for index, reason in enumerate(reasons):
        rollouts.record(TrajectoryLost(id=TrajectoryId(3, 0, index), reason=reason, at_s=1.0))
    return rollouts


def test_all_lost_for_one_reason_says_how_many_and_the_first_cause() -> None:
    reasons = [f"the harness exited with status 1: /tmp/mt-{i}/a.py, No module named 'nope'" for i in "abc"]
    with pytest.raises(InfrastructureFailure, match="3 of 3 trajectories lost: .*mt-a.*No module named 'nope'"):
        lose(*reasons)


def test_different_reasons_do_not_end_the_run() -> None:
    assert len(lose("sandbox 3 died", "the grader gave None").lost) == 2
