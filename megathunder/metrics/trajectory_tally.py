"""What an update learned from, as numbers: rewards, lengths, ends, versions; in all and for each kind of task.

Every figure is a field of the row with the same name. Called by `aggregate.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from megathunder.metrics.row import KindMetrics
from megathunder.metrics.summary import Summary
from megathunder.types import Trajectory


@dataclass(slots=True)
class TrajectoryTally:
    """Sums of the trajectories of one update. `sampled_version`: of the policy that sampled them."""

    _counted: list[tuple[str, Trajectory]] = field(default_factory=list)
    _rewards: dict[int, Summary] = field(default_factory=lambda: defaultdict(Summary))
    _turns: list[int] = field(default_factory=list)
    _side_turns: int = 0
    _sampled: list[int] = field(default_factory=list)
    _ends: Counter[str] = field(default_factory=Counter)
    _versions: Counter[int] = field(default_factory=Counter)
    _negative_logprobs: Summary = field(default_factory=Summary)

    def add(self, trajectory: Trajectory, *, kind: str, counts: bool) -> None:
        """A sampled trajectory; `counts`: its reward is one of the batch."""
        if trajectory.reward is not None and counts:
            self._rewards[trajectory.id.group] += Summary.of([trajectory.reward])
            self._counted.append((kind, trajectory))
        self._turns.append(trajectory.turns)
        self._side_turns += trajectory.side_turns
        self._sampled.append(trajectory.sampled_tokens)
        self._ends[trajectory.end_reason.value] += 1
        for row in trajectory.rows:
            self._versions.update(row.policy_versions)
            self._negative_logprobs += Summary.of(-p for part in row.segments for p in part.logprobs)

    @property
    def sampled_tokens(self) -> int:
        return sum(self._sampled)

    @property
    def rewards(self) -> list[float]:
        return [t.reward for _, t in self._counted if t.reward is not None]

    def fields(self, learner_version: int) -> dict[str, object]:
        """Fields of the row. Lags count from `learner_version`."""
        rewards, groups = self.rewards, list(self._rewards.values())
        means = Summary.of(group.mean for group in groups)
        lags = {learner_version - version: n for version, n in sorted(self._versions.items(), reverse=True)}
        return {
            "reward_mean": Summary.of(rewards).mean,
            "reward_std": _population_std(rewards),
            "reward_quantiles": _quantiles(rewards),
            "reward_parts": _part_means(t for _, t in self._counted) or None,
            "by_kind": dict(self._by_kind()) or None,
            "prompt_reward_min": means.minimum if groups else 0.0,
            "prompt_reward_max": means.maximum if groups else 0.0,
            "prompt_best_mean": Summary.of(group.maximum for group in groups).mean,
            "trajectories": len(self._turns),
            "turns_mean": Summary.of(self._turns).mean,
            "side_turns": self._side_turns,
            "response_tokens_mean": Summary.of(self._sampled).mean,
            "response_tokens_max": max(self._sampled, default=None),
            "end_reasons": dict(self._ends) or None,
            "entropy": self._negative_logprobs.mean if self._negative_logprobs.count else None,
            "policy_lag_max": max(lags, default=0),
            "tokens_by_lag": lags,
        }

    def _by_kind(self) -> Iterator[tuple[str, KindMetrics]]:
        kinds: Mapping[str, list[Trajectory]] = defaultdict(list)
        for kind, trajectory in self._counted:
            kinds[kind].append(trajectory)
        for kind, some in sorted(kinds.items()):
            yield (
                kind,
                KindMetrics(
                    trajectories=len(some),
                    reward_mean=Summary.of(t.reward or 0.0 for t in some).mean,
                    turns_mean=Summary.of(t.turns for t in some).mean,
                    response_tokens_mean=Summary.of(t.sampled_tokens for t in some).mean,
                    reward_parts=_part_means(some),
                ),
            )


def _part_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean of each part of the reward over the trajectories that have it."""
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            parts[name].append(value)
    return {name: Summary.of(values).mean for name, values in sorted(parts.items())}


def _quantiles(values: Sequence[float]) -> tuple[float, ...] | None:
    if len(values) < 2:
        return None
    return (min(values), *quantiles(values, n=4, method="inclusive"), max(values))


def _population_std(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
