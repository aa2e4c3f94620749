"""Advantages of a group by name, each a function from its signals to weights (`weights.py`).

    grpo.advantage                  A_i                                                        weights   also
    std                             (r - mean) / (std + eps), population std                   affine    GRPO
    sample_std                      the same with n - 1                                        affine    GRPO
    none                            r - mean                                                   affine    Dr. GRPO
    leave_one_out                   r - mean of the others                                     affine    RLOO
    reinforce_plus_plus_baseline    (r - mean) / (std of that over the batch + eps)            affine    REINFORCE++
    maxrl                           (r - mean) / (mean + eps), rewards >= 0                    affine    MaxRL
    pass_at_k                       k (E max of k with i - E max of k without i)               table     PKPO
    gdpo                            sum_j w_j (r_j - mean_j) / (std_j + eps), over batch std   affine    GDPO
    "adv.py:f"                      f(rewards)[i], equal rewards treated equally               table

pass_at_k: expectations over subsets of the group without replacement; its sum of A_i g_i is an unbiased gradient of the
expected maximum of k rewards (pass@k for 0 and 1), with k = 1 that of leave_one_out. A deviation over the batch is one
number at the barrier: it multiplies the normaliser. Statistics are over the n survivors of a group, in float64 with
exactly rounded sums, so they do not depend on the order in which rewards arrive. A group whose rewards are all equal
contributes exactly 0 under every name. Called by grpo.py at the closure of a group.

Refuses: unknown names, a group that is smaller than the statistics need, rewards that are not finite or
beyond 1e30, functions that raise, or whose answer has another length, is not finite, or differs between equal rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megathunder.config.objective import GrpoConfig
from megathunder.config.streamable import reject_non_streamable
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.weights import Affine, Signal, Table, Weights
from megathunder.registry import ADVANTAGES

Rewards = Sequence[float]
LARGEST = 1e30  # of a reward: a moment holds its product with a gradient in float32
EQUAL = 1e-150  # rewards that differ by less are equal: the squares of their deviations are 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Count, least, mean and sum of squared deviations of the rewards of one group's survivors (float64)."""

    count: int
    least: float
    mean: float
    squared_deviations: float
    degenerate: bool
    """All rewards equal (or at most one): the group contributes exactly 0."""

    @classmethod
    def of(cls, rewards: Rewards) -> GroupStatistics:
        """Statistics of `rewards`, any order, any float type; UserError where one is not finite."""
        values = [float(r) for r in rewards]
        if not all(math.isfinite(v) for v in values):
            raise UserError(
                f"a group with rewards {values}",
                expected="finite rewards",
                remedy="report a failed verifier as an infrastructure failure, not as a NaN or infinite reward",
            )
        if any(abs(v) > LARGEST for v in values):
            raise UserError(
                f"a group with rewards {values}",
                expected=f"rewards of at most {LARGEST:g} in magnitude: gradients times rewards are kept in float32",
                remedy="scale or clip the reward",
            )
        count = len(values)
        mean = math.fsum(values) / count if count else 0.0
        squares = math.fsum((v - mean) ** 2 for v in values)
        return cls(
            count=count,
            least=min(values, default=0.0),
            mean=mean,
            squared_deviations=squares,
            degenerate=max(values, default=0.0) - min(values, default=0.0) < EQUAL,
        )

    def deviation(self, freedom: int, epsilon: float) -> float:
        return math.sqrt(self.squared_deviations / freedom) + epsilon


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantage:
    """One row of the table. `slope` (affine ones) answers a of A = a (r - mean) from the statistics of one reward;
    `table` (the others) the advantage of every reward of a group."""

    slope: Callable[[GroupStatistics, GrpoConfig], float] | None = None
    table: Callable[[Rewards, GrpoConfig], Rewards] | None = None
    smallest_group: Callable[[GrpoConfig], int] = lambda config: 2
    over_batch: bool = False
    """Weights are divided by their standard deviation over the batch."""
    each_reward: bool = False
    """Every reward of a trajectory is compared by itself; elsewhere their weighted sum is."""
    name: str = ""

    @property
    def affine(self) -> bool:
        return self.slope is not None

    def weights(self, signals: Sequence[Signal], config: GrpoConfig) -> Weights:
        """Weights of a group with these signals."""
        if self.table is not None:
            return Table(self._checked([signal[0] for signal in signals], config))
        constant, slopes = 0.0, []
        for number, rewards in enumerate(zip(*signals, strict=True)):
            statistics = GroupStatistics.of(rewards)
            factor = config.reward_weights[number] if self.each_reward and config.reward_weights else 1.0
            assert self.slope is not None
            slopes.append(0.0 if statistics.degenerate else factor * self.slope(statistics, config))
            constant -= statistics.mean * slopes[-1]
        return Affine(constant if any(slopes) else 0.0, tuple(slopes))

    def _checked(self, rewards: Rewards, config: GrpoConfig) -> dict[Signal, float]:
        """The table of `rewards`, if it is one."""
        GroupStatistics.of(rewards)
        assert self.table is not None
        try:
            found = [float(a) for a in self.table(list(rewards), config)]
        except (Exception, SystemExit) as error:  # the user's own function: anything may happen in it
            raise self._wrong(rewards, f"raised {type(error).__name__}: {error}") from error
        if len(found) != len(rewards) or not all(map(math.isfinite, found)):
            raise self._wrong(rewards, f"answered {found}")
        table: dict[Signal, float] = {}
        for reward, advantage in zip(rewards, found, strict=True):
            if table.setdefault((reward,), advantage) != advantage:
                raise self._wrong(rewards, f"gave {table[reward,]} and {advantage} to two rewards of {reward}")
        return table

    def _wrong(self, rewards: Rewards, seen: str) -> UserError:
        return UserError(
            f"grpo.advantage = {self.name!r} on the rewards {list(rewards)}: it {seen}",
            expected=f"{len(rewards)} finite numbers, the same one for equal rewards",
            remedy="let it depend on the values of the rewards alone, not on their order",
        )


def _one_of(config: GrpoConfig) -> int:
    return 1


def _more_than_k(config: GrpoConfig) -> int:
    return config.pass_k + 1


def best_of_k(rewards: Rewards, k: int) -> list[float]:
    """k (E max of k rewards with i - E max of k rewards without i), for every i; k below the number of rewards.

    >>> best_of_k([1.0, 0.0, 0.0], 2)
    [2.0, -1.0, -1.0]
    """
    n, order = len(rewards), sorted(set(rewards))
    counts = Counter(rewards)

    def expected_max(reward: float, others: int, drawn: int) -> float:
        """Of `drawn` rewards out of the `others` that are not i, and of `reward`, which counts."""
        total, ways, below = 0.0, math.comb(others, drawn), 0
        for value in order:
            here = counts[value] - (value == own)
            share = (math.comb(below + here, drawn) - math.comb(below, drawn)) / ways
            total += share * max(value, reward)
            below += here
        return total

    found = {}
    for own in order:
        with_it = expected_max(own, n - 1, k - 1) if k > 1 else own
        found[own] = k * (with_it - expected_max(-math.inf, n - 1, k))
    return [found[reward] for reward in rewards]


def _pass_at_k(rewards: Rewards, config: GrpoConfig) -> Rewards:
    k = config.pass_k
    return best_of_k(rewards, k) if len(rewards) > k and len(set(rewards)) > 1 else [0.0] * len(rewards)


def _maxrl(statistics: GroupStatistics, config: GrpoConfig) -> float:
    if statistics.least < 0:
        raise UserError(
            f"grpo.advantage = 'maxrl' with a reward of {statistics.least:g}",
            expected="rewards of at least 0: their mean is what advantages are divided by",
            remedy="shift the reward, or use grpo.advantage = 'std'",
        )
    return 1.0 / (statistics.mean + config.epsilon)


def _inverse_deviation(statistics: GroupStatistics, config: GrpoConfig) -> float:
    return 1.0 / statistics.deviation(statistics.count, config.epsilon)


def _one(statistics: GroupStatistics, config: GrpoConfig) -> float:
    return 1.0


BUILT_IN = {
    "std": Advantage(slope=_inverse_deviation),
    "sample_std": Advantage(slope=lambda s, config: 1.0 / s.deviation(s.count - 1, config.epsilon)),
    "none": Advantage(slope=_one, smallest_group=_one_of),
    "leave_one_out": Advantage(slope=lambda s, config: s.count / (s.count - 1)),
    "reinforce_plus_plus_baseline": Advantage(slope=_one, over_batch=True),
    "maxrl": Advantage(slope=_maxrl),
    "pass_at_k": Advantage(table=_pass_at_k, smallest_group=_more_than_k, name="pass_at_k"),
    "gdpo": Advantage(slope=_inverse_deviation, over_batch=True, each_reward=True),
}
for _name, _advantage in BUILT_IN.items():
    ADVANTAGES.register(_name)(_advantage)


def find_advantage(config: GrpoConfig, group_size: int) -> Advantage:
    """The advantage that `config` names; ConfigError where it is unknown, or needs more than `group_size`
    trajectories."""
    reject_non_streamable(config.advantage)
    found = ADVANTAGES.get(config.advantage)
    if not isinstance(found, Advantage):
        function: Callable[[Rewards], Rewards] = found
        found = Advantage(table=lambda rewards, _: function(rewards), smallest_group=_one_of, name=config.advantage)
    needed = found.smallest_group(config)
    if group_size < needed:
        raise ConfigError(
            f"grpo.advantage = {config.advantage!r} with run.group_size = {group_size}",
            expected=f"groups of at least {needed}: one reward has no spread and no other to compare with",
            remedy=f"set run.group_size to {needed} or more (8 is usual), or objective = 'opd', which has no groups",
        )
    return found
