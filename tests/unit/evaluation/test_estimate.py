"""pass@k equals the closed form; errors are reported both ways; kept attempts are not made again."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest

from megathunder.errors import UserError
from megathunder.evaluation import EVALUATION, Attempt, AttemptLog, Plan, pass_at_k, run_attempts, score
from megathunder.tasks import ExactAnswer, Task
from megathunder.types import (
    EndReason,
    Rewarded,
    Row,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
)

PLAN = Plan(checkpoint="a", tasks="b", seed=0, temperature=1.0, limits="")
TASKS = [Task(id=f"t{i}", kind="k", prompt="p", files=(), grading=ExactAnswer(answer="1")) for i in range(3)]


def attempt(task: str, number: int, reward: float | None) -> Attempt:
    return Attempt(task_id=task, kind="k", number=number, reward=reward)


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (5, 2, 5), (6, 0, 3), (6, 6, 3), (4, 1, 4)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_attempt(n, c, k):
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_pass_at_k_is_unbiased_for_a_policy_of_known_success():
    p, n, k = 0.3, 5, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_k_above_the_attempts_is_refused():
    with pytest.raises(ValueError, match="pass@5 of 1 right in 4"):
        pass_at_k(4, 1, 5)


def test_eight_samples_of_one_prompt_are_all_kept():
    result = score([attempt("t", i, 1.0) for i in range(8)])
    assert (result.tasks, result.sent, result.accuracy_over_all) == (1, 8, 1.0)


def test_four_sent_three_done_two_right_is_half_of_all_and_two_thirds_of_completed():
    result = score([attempt("t", 0, 1.0), attempt("t", 1, 1.0), attempt("t", 2, 0.0), attempt("t", 3, None)])
    assert (result.sent, result.completed, result.right) == (4, 3, 2)
    assert result.accuracy_over_all == 0.5 and result.accuracy_over_completed == pytest.approx(2 / 3)
    first = result.pass_at[0]
    assert first.over_all.value == 0.5 and first.over_completed.value == pytest.approx(2 / 3)
    assert result.pass_at[2].over_all.value is None  # 4 attempts have no pass@5


def test_each_task_weighs_the_same_however_many_attempts_it_had():
    rewards = [attempt("a", i, 1.0) for i in range(9)] + [attempt("b", 0, 0.0)]
    assert score(rewards).pass_at[0].over_all.value == 0.5 and score(rewards).accuracy_over_all == 0.9


def test_the_interval_covers_the_true_rate_about_as_often_as_it_says():
    rng, covered = np.random.default_rng(1), 0
    for trial in range(100):
        made = [attempt(f"t{t}", 0, float(rng.random() < 0.4)) for t in range(60)]
        interval = score(made, [1], seed=trial).pass_at[0].over_all
        covered += interval.low <= 0.4 <= interval.high
    assert 86 <= covered <= 100


def test_partial_rewards_are_no_success_and_weights_that_round_are():
    result = score([attempt("t", 0, 0.7), attempt("t", 1, 0.1 + 0.2 + 0.7)])
    assert result.right == 1 and result.reward_mean == pytest.approx(0.85)


class Collector:
    """Rewards 1 for even attempts, loses attempt 1 of task 1 until `mended`."""

    def __init__(self) -> None:
        self.seen, self.mended = [], False

    async def attempt(self, policy_version, work, emit, *, batch, temperature=None, score=True):
        for trajectory, task in work:
            self.seen.append(trajectory)
            if trajectory[1:] == (1, 1) and not self.mended:
                emit(TrajectoryLost(id=trajectory, reason="the server died", at_s=1.0))
                continue
            done = Trajectory(
                id=trajectory,
                task_id=task.id,
                rows=(Row(segments=()),),
                end_reason=EndReason.ANSWERED,
                started_s=0.0,
                completed_s=2.0,
                turns=1,
            )
            emit(TrajectoryCompleted(trajectory=done, at_s=1.0))
            emit(Rewarded(id=trajectory, reward=float(trajectory.index % 2 == 0), verifier_s=0.0, at_s=1.0))


def run(collector: Collector, log: AttemptLog, attempts: int) -> None:
    asyncio.run(run_attempts(collector, TASKS, attempts, log.add, policy_version=0, finished=log.finished))


def test_a_resumed_evaluation_makes_only_what_is_missing_or_lost_under_the_same_seeds(tmp_path):
    collector, path = Collector(), tmp_path / "a.jsonl"
    run(collector, AttemptLog(path, PLAN), 2)
    assert len(set(collector.seen)) == 6
    collector.seen, collector.mended = [], True
    with path.open("ab") as file:
        file.write(b'{"task_id":"cut')  # the process died while it wrote
    log = AttemptLog(path, PLAN)
    run(collector, log, 3)
    assert sorted(collector.seen) == [TrajectoryId(EVALUATION, *p) for p in ((0, 2), (1, 1), (1, 2), (2, 2))]
    again = AttemptLog(path, PLAN)
    assert sorted(a.number for a in again.attempts) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert score(again.attempts).completed == 9 and score(again.attempts).right == 6


def test_attempts_of_another_plan_are_refused(tmp_path):
    AttemptLog(tmp_path / "a.jsonl", PLAN)
    with pytest.raises(UserError, match="another evaluation"):
        AttemptLog(tmp_path / "a.jsonl", Plan(checkpoint="z", tasks="b", seed=0, temperature=1.0, limits=""))
