"""What the learner did, in numbers that add up over commands, replicas and cells. None: not measured here.

    a + b      of two pieces of work: sums add, maxima are the larger
    a | b      of one piece of work as two pipeline stages saw it: the one that counted more, field by field

Made by the learner, summed there over a cell and by the metrics over cells.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple, TypeVar

import msgspec

Number = TypeVar("Number", int, float)


def add_known(a: Number | None, b: Number | None) -> Number | None:
    """The sum of what is known."""
    return b if a is None else a if b is None else a + b


def greater_known(a: Number | None, b: Number | None) -> Number | None:
    """The greater of what is known."""
    return b if a is None else a if b is None else max(a, b)


def _farther(a: Number | None, b: Number | None) -> Number | None:
    """The one that is farther from 0, of what is known."""
    return b if a is None else a if b is None else max(a, b, key=abs)


class SaltStats(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over `geometries` Gram matrices and over `sketched` squared lengths; the two maxima are over matrices."""

    geometries: int = 0
    cancellation: float = 0.0
    factor: float = 0.0
    rank: float = 0.0
    spectrum: tuple[float, ...] = ()
    cancellation_max: float = 0.0
    factor_max: float = 0.0
    sketched: int = 0
    sketch_error: float = 0.0

    def __add__(self, other: SaltStats) -> SaltStats:
        return SaltStats(
            geometries=self.geometries + other.geometries,
            cancellation=self.cancellation + other.cancellation,
            factor=self.factor + other.factor,
            rank=self.rank + other.rank,
            spectrum=tuple(a + b for a, b in zip_longest(self.spectrum, other.spectrum, fillvalue=0.0)),
            cancellation_max=max(self.cancellation_max, other.cancellation_max),
            factor_max=max(self.factor_max, other.factor_max),
            sketched=self.sketched + other.sketched,
            sketch_error=self.sketch_error + other.sketch_error,
        )


class LogprobGap(NamedTuple):
    """A row in which engine and learner are `nats` apart on a trained token."""

    source: str
    nats: float


class WorkStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one command did."""

    tokens: int = 0  # computed, padding and context excluded
    trained_tokens: int = 0  # sampled, and differentiated
    loss_sum: float = 0.0  # sum over rows of scale * sum_t weight * (-log pi); coefficients known later are not in it
    logprob_diff_max: float = 0.0  # |log pi_learner - log pi_engine| over trained tokens
    logprob_diff_sum: float = 0.0
    logprob_gaps: tuple[LogprobGap, ...] = ()  # rows above learner.logprob_gap_alarm
    flops: float = 0.0
    replay_tokens: int = 0  # computed again for deferred context gradients
    grad_norm: float = 0.0
    stepped: bool = False
    skip_reason: str = ""
    learning_rate: float = 0.0
    accumulator_bytes: int = 0
    payload_bytes: int = 0
    divergences: tuple[float, ...] = ()  # of the rows of a Score
    failed_servers: tuple[str, ...] = ()  # names of the servers that did not acknowledge a publication
    prompt_tokens_saved: int | None = None  # shared, so not computed again; None: prompts are not shared
    kl_sum: float | None = None  # of the loss term to the reference, each row by its unit; None: no such term
    exposed_copy_s: float | None = None  # a GPU waited for copies; None: no accumulator in host memory
    salt: SaltStats | None = None  # None: no gradient was reweighed or measured

    def __add__(self, other: WorkStats) -> WorkStats:
        return WorkStats(
            **{name: getattr(self, name) + getattr(other, name) for name in SUMS},
            **{name: max(getattr(self, name), getattr(other, name)) for name in MAXIMA},
            stepped=self.stepped or other.stepped,
            skip_reason=self.skip_reason or other.skip_reason,
            logprob_gaps=self.logprob_gaps + other.logprob_gaps,
            failed_servers=tuple(sorted({*self.failed_servers, *other.failed_servers})),
            prompt_tokens_saved=add_known(self.prompt_tokens_saved, other.prompt_tokens_saved),
            kl_sum=add_known(self.kl_sum, other.kl_sum),
            exposed_copy_s=greater_known(self.exposed_copy_s, other.exposed_copy_s),
            salt=add_known(self.salt, other.salt),
        )

    def __or__(self, other: WorkStats) -> WorkStats:
        """`self` with the measurements that only some stages make."""
        return msgspec.structs.replace(
            self,
            prompt_tokens_saved=_farther(self.prompt_tokens_saved, other.prompt_tokens_saved),
            kl_sum=_farther(self.kl_sum, other.kl_sum),
            exposed_copy_s=greater_known(self.exposed_copy_s, other.exposed_copy_s),
            salt=max((s for s in (self.salt, other.salt) if s), key=lambda s: s.geometries, default=None),
        )


SUMS = ("tokens", "trained_tokens", "loss_sum", "logprob_diff_sum", "flops", "replay_tokens", "payload_bytes")
MAXIMA = ("logprob_diff_max", "grad_norm", "learning_rate", "accumulator_bytes")
