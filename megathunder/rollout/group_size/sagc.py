"""Straggler-aware group control: the largest groups whose long-run rate of stragglers stays at a target.

    maximise E[log2 G]  subject to  E[S] <= delta                S: whether a group had a straggler

    choose     p_G ~ Beta(a_G, b_G) for G and its neighbours on the ladder;  G_t = argmax log2 G - lambda p_G
    learn      every count c of every size <- forgetting * c, then a_G += groups that straggled, b_G += the others
    price      lambda <- min(limit, max(0, lambda + eta (S - delta))) for every group       projected dual ascent

The dual law, whatever the streams do: as long as the limit is not reached, the mean of S over N groups is at most
delta + (lambda_N - lambda_0) / (eta N); and with lambda > 0 all along it is exactly that.

Source: the SAGC paper's formulas. Our reading where its summary is silent: an update's groups share its size, each
takes a dual step of its own, and they are learnt from together when the update ends; counts decay towards the prior and
for sizes not tried as well, so that what is not looked at becomes uncertain again; lambda has an upper limit, because
with a ladder whose smallest size straggles too often it would grow for ever; and prompt-aware risk, which the paper
leaves to the future:

    p_(G, prompt) ~ Beta(k m_G + a, k (1 - m_G) + b),   m_G the mean over all prompts, a and b the prompt's own counts

Every prompt (a kind of task, or a task) then moves along the ladder by itself, one rung at most from one of its groups
to the next; one that is new starts beside the middle size of the last update. lambda is common to all.

Randomness is a function of (seed, step, prompt), so the state alone decides what a resumed run chooses. Pure; called by
coordinator/ and simulator/. A step is a batch of prompts; steps are closed in order, and chosen ahead if need be.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import msgspec

from megathunder.config.sagc import SagcConfig
from megathunder.rollout.group_size.straggler import GroupOutcome

NEGLIGIBLE = 1e-3
"""Counts of a prompt below this are forgotten altogether."""
KEPT_STEPS = 32
"""Closed steps whose choices are kept: a comparison asks for a batch again in the blocks of its other schedules."""
POOLED = ""


class Belief(msgspec.Struct, frozen=True):
    """Decayed numbers of groups that straggled and did not; the prior is not in them."""

    straggled: float = 0.0
    steady: float = 0.0

    def decayed(self, factor: float) -> Belief:
        return Belief(self.straggled * factor, self.steady * factor)

    def plus(self, straggled: bool) -> Belief:
        return Belief(self.straggled + straggled, self.steady + (not straggled))

    @property
    def weight(self) -> float:
        return self.straggled + self.steady


Beliefs = dict[int, Belief]


class SagcState(msgspec.Struct, kw_only=True):
    """All that is remembered: each prompt's size, the multiplier, counts by prompt and size, choices of late steps.
    The prompt POOLED stands for all."""

    sizes: dict[str, int]
    multiplier: float = 0.0
    closed: int = -1
    beliefs: dict[str, Beliefs] = msgspec.field(default_factory=dict)
    chosen: dict[int, dict[str, int]] = msgspec.field(default_factory=dict)


class Sagc:
    """See the module docstring. `first` is the size of the first step, one of the ladder's."""

    def __init__(self, settings: SagcConfig, first: int, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._state = SagcState(sizes={POOLED: first})

    # ------------------------------------------------------------------------------------------ choice

    def size(self, step: int, prompt: str = POOLED) -> int:
        """The size of a group in step `step`; the same for every question about it. Where prompts move by themselves,
        that of POOLED is the middle one of the last step."""
        state = self._state
        chosen = state.chosen.setdefault(step, {})
        if prompt not in chosen:
            last = state.sizes.get(prompt, state.sizes[POOLED])
            still = self._is_first(step) or (prompt == POOLED and self._settings.prompt_prior != "off")
            chosen[prompt] = last if still else self._best(self.neighbours(last), step, prompt)
            state.sizes[prompt] = chosen[prompt]
        return chosen[prompt]

    def _is_first(self, step: int) -> bool:
        return self._state.closed < 0 and min(self._state.chosen) == step

    def neighbours(self, size: int) -> tuple[int, ...]:
        """`size` and the rungs beside it."""
        at = self._settings.sizes.index(size)
        return self._settings.sizes[max(at - 1, 0) : at + 2]

    def posterior(self, size: int, prompt: str = POOLED) -> tuple[float, float]:
        """(alpha, beta) of the risk of `size`."""
        own = self._state.beliefs.get(prompt, {}).get(size, Belief())
        if prompt == POOLED:
            return self._settings.prior_straggled + own.straggled, self._settings.prior_steady + own.steady
        alpha, beta = self.posterior(size)
        lent = self._settings.prompt_strength / (alpha + beta)
        return lent * alpha + own.straggled, lent * beta + own.steady

    def _best(self, candidates: Sequence[int], step: int, prompt: str) -> int:
        draw = random.Random(f"group size/{self._seed}/{step}/{prompt}")
        risks = {size: draw.betavariate(*self.posterior(size, prompt)) for size in candidates}
        return max(candidates, key=lambda size: math.log2(size) - self._state.multiplier * risks[size])

    # ------------------------------------------------------------------------------------------ learning

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Step `step` has ended so. A step that was closed before (one of a comparison) teaches nothing again."""
        state, settings = self._state, self._settings
        if step <= state.closed:
            return
        state.closed = step
        state.chosen = {s: sizes for s, sizes in state.chosen.items() if s > step - KEPT_STEPS}
        self._decay(settings.forgetting)
        for group in outcomes:
            for name in {POOLED, group.prompt}:
                table = state.beliefs.setdefault(name, {})
                table[group.size] = table.get(group.size, Belief()).plus(group.straggled)
        if outcomes and settings.prompt_prior != "off":
            state.sizes[POOLED] = statistics.median_low(group.size for group in outcomes)
        for group in outcomes:
            ascended = state.multiplier + settings.dual_step * (group.straggled - settings.target_rate)
            state.multiplier = min(max(0.0, ascended), settings.dual_limit)

    def _decay(self, factor: float) -> None:
        beliefs = self._state.beliefs
        for name, table in list(beliefs.items()):
            left = {size: belief.decayed(factor) for size, belief in table.items()}
            beliefs[name] = left if name == POOLED else {s: b for s, b in left.items() if b.weight >= NEGLIGIBLE}
            if not beliefs[name] and name != POOLED:
                del beliefs[name]
                self._state.sizes.pop(name, None)

    # ------------------------------------------------------------------------------------------ state

    @property
    def multiplier(self) -> float:
        return self._state.multiplier

    def encode(self) -> bytes:
        """The state; `decode` of it goes on bit for bit."""
        return msgspec.json.encode(self._state)

    def decode(self, data: bytes) -> None:
        """Go on from `encode`'s bytes. On another ladder the nearest rung is taken, and what is not on it forgotten."""
        state, ladder = msgspec.json.decode(data, type=SagcState), self._settings.sizes

        def nearest(size: int) -> int:
            return min(ladder, key=lambda rung: abs(math.log2(rung / size)))

        state.sizes = {name: nearest(size) for name, size in state.sizes.items()}
        state.chosen = {step: {n: nearest(size) for n, size in t.items()} for step, t in state.chosen.items()}
        state.beliefs = {name: {s: b for s, b in t.items() if s in ladder} for name, t in state.beliefs.items()}
        self._state = state


def prompts_for(target: int, size: int) -> int:
    """Prompts of `size` trajectories each that make about `target`, one at least."""
    return max(1, math.floor(target / size + 0.5))
