"""Tasks that are judged by what is left are graded however the episode ended, and the reason of the end is kept."""

from __future__ import annotations

import pytest
from rollout_fakes import says
from test_episode import collect, only, scripted

from megathunder.evaluation import Attempt
from megathunder.tasks import ExactAnswer, RepositoryTests, Task, TerminalTests
from megathunder.types import EndReason, Rewarded, TrajectoryCompleted

GRADINGS = (
    RepositoryTests(fail_to_pass=("t::a",), pass_to_pass=(), files=()),
    TerminalTests(folder="app", files=()),
)


async def left_in_the_sandbox(task, sandbox, answer, pool, budget_s):
    return float("a" in sandbox.ran)


@pytest.mark.parametrize(
    ("turns", "changes", "reason", "reward"),
    [
        ([says("a"), says("b"), says("c")], {}, EndReason.MAX_TURNS, 1.0),
        ([says("b"), says("b"), says("c")], {}, EndReason.MAX_TURNS, 0.0),
        ([says("a"), says("rm -rf x", end=False)], {}, EndReason.MALFORMED, 1.0),
        ([says("a"), says("b"), says("c")], {"max_tokens": 8}, EndReason.MAX_TOKENS, 1.0),
    ],
)
@pytest.mark.parametrize("grading", GRADINGS)
def test_what_an_agent_that_never_submits_left_is_graded(tmp_path, grading, turns, changes, reason, reward):
    task = Task(id="t", kind="k", prompt="go", files=(), grading=grading, max_turns=3)
    events, _, _ = collect(scripted(*turns), tmp_path, groups=((task,),), grade=left_in_the_sandbox, **changes)
    trajectory = only(events, TrajectoryCompleted)[0].trajectory
    assert only(events, Rewarded)[0].reward == reward
    assert trajectory.end_reason is reason and Attempt.of(trajectory, "k").end_reason == reason.value


def test_a_task_that_asks_for_an_answer_earns_nothing_without_one(tmp_path):
    task = Task(id="t", kind="k", prompt="go", files=(), grading=ExactAnswer(answer="a"), max_turns=1)
    events, _, _ = collect(scripted(says("a")), tmp_path, groups=((task,),), grade=left_in_the_sandbox)
    assert only(events, Rewarded)[0].reward == 0.0
