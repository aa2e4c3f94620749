"""How good a policy is: independent attempts at tasks, kept as they end, and pass@k with its uncertainty."""

from megathunder.evaluation.attempts import Attempt, AttemptLog, Plan
from megathunder.evaluation.estimate import KS, Score, TaskResult, pass_at_k, score
from megathunder.evaluation.runner import EVALUATION, AttemptEnds, run_attempts

__all__ = [
    "EVALUATION",
    "KS",
    "Attempt",
    "AttemptEnds",
    "AttemptLog",
    "Plan",
    "Score",
    "TaskResult",
    "pass_at_k",
    "run_attempts",
    "score",
]
