"""pass@k without bias, and how sure it is.

    pass@k of a task = 1 - C(n - c, k) / C(n, k)       n attempts of which c are right, n >= k
    pass@k           = mean over tasks                 each task weighs the same, however many attempts it had

The estimator's mean over attempts is 1 - (1 - p)^k for a policy that is right with probability p (1 - (1 - c/n)^k is
biased). An attempt that the machinery lost is no attempt of the policy, so every figure is given twice: over all
attempts (a lost one counts as wrong) and over completed ones (it does not count; a task with fewer than k completed
attempts has no pass@k). Intervals: percentiles of the mean over tasks drawn with replacement.
Called by tools/evaluate.py and the coordinator. Refuses k above n.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb

import msgspec
import numpy as np

from megathunder.evaluation.attempts import Attempt

KS = (1, 3, 5)
RESAMPLES = 2000
CONFIDENCE = 0.95


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The probability that k of the attempts, drawn without replacement, hold a right one."""
    if not (0 <= right <= attempts and 1 <= k <= attempts):
        raise ValueError(
            f"pass@{k} of {right} right in {attempts} attempts: want 1 <= k <= attempts, right <= attempts"
        )
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts at one task: `sent` of them, of which `completed` have a reward and `right` are right."""

    task_id: str
    kind: str
    sent: int
    completed: int
    right: int
    reward_mean: float  # over completed attempts; 0 if there are none


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over `tasks` tasks with its bootstrap interval; all None when no task counts."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int


class PassAtK(msgspec.Struct, frozen=True, kw_only=True):
    k: int
    over_all: Estimate
    over_completed: Estimate


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What --json writes. Accuracy is over attempts, pass@k over tasks."""

    tasks: int
    sent: int
    completed: int
    right: int
    accuracy_over_all: float
    accuracy_over_completed: float | None
    reward_mean: float | None  # over completed attempts
    pass_at: tuple[PassAtK, ...]
    by_task: tuple[TaskResult, ...]


def results(attempts: Iterable[Attempt]) -> list[TaskResult]:
    """One result a task, ordered by id: figures do not depend on the order in which attempts ended."""
    by_task: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        by_task.setdefault(attempt.task_id, []).append(attempt)
    found = []
    for task_id, tried in sorted(by_task.items()):
        rewards = [a.reward for a in tried if a.reward is not None]
        found.append(
            TaskResult(
                task_id=task_id,
                kind=tried[0].kind,
                sent=len(tried),
                completed=len(rewards),
                right=sum(a.right for a in tried),
                reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            )
        )
    return found


def score(attempts: Iterable[Attempt], ks: Sequence[int] = KS, *, seed: int = 0) -> Score:
    """Every figure of an evaluation; ks above the attempts of a task are left out for that task."""
    found = results(attempts)
    sent, completed, right = (sum(getattr(r, name) for r in found) for name in ("sent", "completed", "right"))
    rewards = sum(r.reward_mean * r.completed for r in found)
    rng = np.random.default_rng(seed)
    return Score(
        tasks=len(found),
        sent=sent,
        completed=completed,
        right=right,
        accuracy_over_all=right / sent if sent else 0.0,
        accuracy_over_completed=right / completed if completed else None,
        reward_mean=rewards / completed if completed else None,
        pass_at=tuple(
            PassAtK(
                k=k,
                over_all=estimate([pass_at_k(r.sent, r.right, k) for r in found if r.sent >= k], rng),
                over_completed=estimate([pass_at_k(r.completed, r.right, k) for r in found if r.completed >= k], rng),
            )
            for k in ks
        ),
        by_task=tuple(found),
    )


def estimate(values: Sequence[float], rng: np.random.Generator) -> Estimate:
    """The mean of one value a task, [tasks], and the interval of that mean over resampled tasks."""
    if not values:
        return Estimate(value=None, low=None, high=None, tasks=0)
    array = np.asarray(values)
    means = array[rng.integers(len(array), size=(RESAMPLES, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value=float(array.mean()), low=float(low), high=float(high), tasks=len(array))
