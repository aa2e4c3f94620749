"""Fixed group sizes against straggler-aware group control on streams of trajectory lengths, on a virtual clock.

    an update    B prompts (or enough for a target of trajectories) x G lengths l, drawn or measured
    its wall     latency_s max l  +  token_s sum l  +  padded_s N max l
                 decoding takes as long as its longest trajectory, costs what it samples, and a learner that does not
                 pack pads N trajectories to the longest

The lengths of a drawn group are lognormal about its prompt's own scale; `narrowing` makes their log-deviation fall
linearly to that share of itself over the run. A measured group's are drawn, with replacement, from those that a run
recorded for one prompt. The controller is the one that runs live. Called by tools/simulate.py; everything is simulated.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megathunder.config.sagc import SagcConfig
from megathunder.rollout.group_size.sagc import Sagc, prompts_for
from megathunder.rollout.group_size.straggler import GroupOutcome, straggles


class Lengths(Protocol):
    """Where the lengths of a group come from. `progress` goes from 0 to 1 over a run."""

    def draw(self, size: int, progress: float, rng: random.Random) -> list[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Log-deviation `spread` within a group, `between` prompts; a trajectory is cut off at `longest`."""

    spread: float
    between: float = 0.25
    median: float = 1000.0
    longest: float = 8000.0
    narrowing: float = 1.0

    def draw(self, size: int, progress: float, rng: random.Random) -> list[float]:
        scale = self.median * math.exp(self.between * rng.gauss(0.0, 1.0))
        spread = self.spread * (1.0 + (self.narrowing - 1.0) * progress)
        return [min(scale * math.exp(spread * rng.gauss(0.0, 1.0)), self.longest) for _ in range(size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Groups of lengths in the order in which a run recorded them; the policy's progress is followed."""

    groups: tuple[tuple[float, ...], ...]

    def draw(self, size: int, progress: float, rng: random.Random) -> list[float]:
        """From a group of the tenth of the run that `progress` lies in."""
        count = len(self.groups)
        first = min(int(progress * 10), 9) * count // 10
        last = max((min(int(progress * 10), 9) + 1) * count // 10, first + 1)
        return rng.choices(self.groups[rng.randrange(first, min(last, count))], k=size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What updates ask of the machine, in units of length: max l, sum l, N max l; sums over updates."""

    longest: float = 0.0
    sampled: float = 0.0
    padded: float = 0.0

    @classmethod
    def of(cls, lengths: Sequence[float]) -> Load:
        longest = max(lengths)
        return cls(longest=longest, sampled=math.fsum(lengths), padded=len(lengths) * longest)

    def __add__(self, other: Load) -> Load:
        return Load(
            longest=self.longest + other.longest,
            sampled=self.sampled + other.sampled,
            padded=self.padded + other.padded,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WallModel:
    """Seconds a unit of each part of a load."""

    latency_s: float
    token_s: float = 0.0
    padded_s: float = 0.0

    @classmethod
    def shares(cls, load: Load, wall_s: float, latency: float, tokens: float) -> WallModel:
        """The model under which `load` takes `wall_s`, of which these shares are latency and sampled tokens."""
        return cls(
            latency_s=wall_s * latency / load.longest,
            token_s=wall_s * tokens / load.sampled,
            padded_s=wall_s * (1.0 - latency - tokens) / load.padded,
        )

    def wall_s(self, load: Load) -> float:
        return self.latency_s * load.longest + self.token_s * load.sampled + self.padded_s * load.padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A stream and how long it goes on. `trajectories` > 0: prompts follow the size."""

    name: str
    lengths: Lengths
    settings: SagcConfig
    updates: int = 400
    prompts: int = 8
    trajectories: int = 0
    first: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One run of one way to size groups, in totals and, for the controller, update by update."""

    policy: str
    straggler_rate: float
    """Of all groups."""
    utility: float
    """Mean of log2 G over groups."""
    load: Load
    trajectories: int
    groups_by_size: dict[int, int]
    sizes: tuple[int, ...]
    multipliers: tuple[float, ...]
    rates: tuple[float, ...]


def play(case: Case, size: int | None, seed: int) -> Played:
    """`size` trajectories a group throughout; None: what the controller chooses."""
    rng = random.Random(f"{case.name}/{size}/{seed}")
    sagc = Sagc(case.settings, case.first, seed)
    sizes: list[int] = []
    multipliers: list[float] = []
    rates: list[float] = []
    counted: Counter[int] = Counter()
    load, trajectories = Load(), 0
    for update in range(case.updates):
        chosen = size or sagc.size(update)
        prompts = prompts_for(case.trajectories, chosen) if case.trajectories else case.prompts
        progress = update / case.updates
        groups = [case.lengths.draw(chosen, progress, rng) for _ in range(prompts)]
        outcomes = [GroupOutcome(size=chosen, straggled=straggles(g, case.settings.threshold)) for g in groups]
        if size is None:
            sagc.observe(update, outcomes)
        load += Load.of([length for group in groups for length in group])
        trajectories += chosen * prompts
        counted[chosen] += prompts
        sizes.append(chosen)
        multipliers.append(sagc.multiplier)
        rates.append(statistics.fmean(outcome.straggled for outcome in outcomes))
    total = counted.total()
    return Played(
        policy=f"fixed {size}" if size else "sagc",
        straggler_rate=math.fsum(rate * n for rate, n in zip(rates, _prompts(case, sizes), strict=True)) / total,
        utility=math.fsum(math.log2(g) * n for g, n in counted.items()) / total,
        load=load,
        trajectories=trajectories,
        groups_by_size=dict(sorted(counted.items())),
        sizes=tuple(sizes),
        multipliers=tuple(multipliers),
        rates=tuple(rates),
    )


def _prompts(case: Case, sizes: Sequence[int]) -> list[int]:
    return [prompts_for(case.trajectories, size) if case.trajectories else case.prompts for size in sizes]


def risk(lengths: Lengths, size: int, threshold: float, *, seed: int = 0, draws: int = 4000) -> float:
    """Share of groups of `size` that straggle, over a whole run."""
    rng = random.Random(seed)
    return statistics.fmean(straggles(lengths.draw(size, i / draws, rng), threshold) for i in range(draws))
