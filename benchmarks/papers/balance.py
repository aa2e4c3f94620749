"""Speed-up of thundersync over sync against the ratio of rollout to learner time, for batch sizes and turns.

`PaperModel` holds four numbers, fitted to the peaks that the paper states (they are not derived from anything else):
    ratio r        rollout time over learner time at the reference batch of 256 trajectories
    learner        linear in the batch
    rollout        linear above the reference batch (full waves); below it `latency_share` of it does not shrink
    release        uniform in time after a wait for the first trajectory (GRPO), or for the first turn, 1/turns of a
                   trajectory's (OPD); replayed context is left out
    suffix, waits  constant in seconds, so they shrink as shares when the batch grows
Not reproduced: one wave of lognormal durations (no shift of the peak at 64), a rollout linear in every batch (no
shift either), one wait for both objectives (1.949 instead of 1.967 for OPD with 10 turns). Called by tools/simulate.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.simulator.costs import CostModel
from megathunder.simulator.release_model import Release, ReleaseCurve, speedup
from megathunder.simulator.schedule_replay import replay
from megathunder.simulator.traces import AttemptTrace, TurnTrace, UpdateTrace

BATCHES = (64, 256, 2048)
TURNS = (10, 30, 100, 300)
RATIOS = tuple(round(0.02 * k, 2) for k in range(5, 151))
GROUP_SIZE = 8
REPLAY_LIMIT = 30_000
"""Turns of a batch up to which a peak is replayed as well as computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """Shares of the rollout time at the reference batch."""

    reference_batch: int = 256
    latency_share: float = 0.4
    grpo_wait: float = 0.134
    opd_wait: float = 0.042
    suffix: float = 0.0256

    def wait(self, objective: str, batch: int, turns: int) -> float:
        """Time to the first release, as a share of the rollout of `batch`."""
        wait = self.grpo_wait if objective == "grpo" else self.opd_wait / turns
        return wait / self.rollout(batch)

    def rollout(self, batch: int) -> float:
        waves = batch / self.reference_batch
        return max(self.latency_share + (1.0 - self.latency_share) * waves, waves)

    def learner(self, batch: int, ratio: float) -> float:
        return batch / self.reference_batch / ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRow:
    """Predicted speed-up at one ratio."""

    objective: str
    batch: int
    turns: int
    ratio: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The best ratio of a curve; `replayed` is the speed-up there by replay through the schedule, None if too large."""

    objective: str
    batch: int
    turns: int
    ratio: float
    speedup: float
    replayed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A peak that the paper states, beside ours under the assumptions above."""

    name: str
    paper: float
    ours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceResult:
    """Curves, their peaks, and the comparison with the paper."""

    assumptions: PaperModel
    rows: tuple[BalanceRow, ...]
    peaks: tuple[Peak, ...]
    references: tuple[Reference, ...]


@functools.lru_cache(maxsize=64)
def curve(model: PaperModel, objective: str, batch: int, turns: int) -> ReleaseCurve:
    return ReleaseCurve(releases(model, objective, batch, turns))


def releases(model: PaperModel, objective: str, batch: int, turns: int) -> list[Release]:
    """Equal pieces of work, evenly spread from the first release to the end of the rollout (at most 4,096 of them)."""
    pieces = batch if objective == "grpo" else min(batch * turns, 4096)
    wait = model.wait(objective, batch, turns)
    return [Release(wait + (1.0 - wait) * k / max(pieces - 1, 1), 1.0) for k in range(pieces)]


def predicted(model: PaperModel, objective: str, batch: int, turns: int, ratio: float) -> float:
    """Speed-up by the release model."""
    rollout = model.rollout(batch)
    rho = model.learner(batch, ratio) / rollout
    tail = curve(model, objective, batch, turns).tail(rho)
    return speedup(rho, tail, model.suffix / rollout)


def replayed(model: PaperModel, objective: str, batch: int, turns: int, ratio: float) -> float:
    """The same by replay of a trace with these release times, sync and thundersync."""
    rollout = model.rollout(batch)
    trace = _trace(model, objective, batch, turns)
    costs = CostModel(token_s=model.learner(batch, ratio) / rollout / trace.tokens, replay=0.0)
    config = Config(
        objective="opd" if objective == "opd" else "grpo",
        schedule="thundersync",
        streaming=StreamingConfig(
            release="turn" if objective == "opd" else "trajectory", pack_tokens=turns, max_open_groups=batch
        ),
    )
    streamed = replay(config, trace, costs)
    learner = model.learner(batch, ratio) / rollout
    return (trace.rollout_s + learner + trace.suffix_s) / streamed.step_wall_s


def _trace(model: PaperModel, objective: str, batch: int, turns: int) -> UpdateTrace:
    times = [r.at for r in releases(model, "grpo", batch, turns)]
    wait = model.wait("opd", batch, turns)
    total = batch * turns
    attempts = []
    for number in range(batch):
        if objective == "opd":
            at = [wait + (1.0 - wait) * (k * batch + number) / (total - 1) for k in range(turns)]
        else:
            at = [times[number]] * turns
        steps = tuple(TurnTrace(context_tokens=0, action_tokens=1, completed_s=t, scored_s=t) for t in at)
        attempts.append(
            AttemptTrace(
                # Neighbours in time belong to different groups; every group holds both rewards.
                group=number % (batch // GROUP_SIZE),
                index=number // (batch // GROUP_SIZE),
                turns=steps,
                completed_s=at[-1],
                reward=float(number // (batch // GROUP_SIZE) % 2),
            )
        )
    return UpdateTrace(attempts=tuple(attempts), suffix_s=model.suffix / model.rollout(batch))


def balance(
    model: PaperModel, *, batches: Sequence[int] = BATCHES, turns: Sequence[int] = TURNS, replay_peaks: bool = True
) -> BalanceResult:
    """Curves for GRPO (turns change nothing: the shortest alone) and OPD."""
    rows: list[BalanceRow] = []
    peaks: list[Peak] = []
    for objective in ("grpo", "opd"):
        for batch in batches:
            for count in turns if objective == "opd" else turns[:1]:
                line = [
                    BalanceRow(
                        objective=objective,
                        batch=batch,
                        turns=count,
                        ratio=ratio,
                        speedup=predicted(model, objective, batch, count, ratio),
                    )
                    for ratio in RATIOS
                ]
                best = max(line, key=lambda row: row.speedup)
                small = replay_peaks and batch * count <= REPLAY_LIMIT
                again = replayed(model, objective, batch, count, best.ratio) if small else None
                rows += line
                peaks.append(
                    Peak(
                        objective=objective,
                        batch=batch,
                        turns=count,
                        ratio=best.ratio,
                        speedup=best.speedup,
                        replayed=again,
                    )
                )
    return BalanceResult(assumptions=model, rows=tuple(rows), peaks=tuple(peaks), references=paper_references(model))


def paper_references(model: PaperModel) -> tuple[Reference, ...]:
    """The peaks of the paper's modelled sweeps and ours."""

    def peak(objective: str, batch: int, turns: int) -> BalanceRow:
        values = [(predicted(model, objective, batch, turns, ratio), ratio) for ratio in RATIOS]
        best, ratio = max(values)
        return BalanceRow(objective=objective, batch=batch, turns=turns, ratio=ratio, speedup=best)

    ours = (
        ("GRPO, 256 trajectories, peak", 1.84, peak("grpo", 256, 10).speedup),
        ("OPD, 2,048 trajectories, peak", 2.00, peak("opd", 2048, 10).speedup),
        ("GRPO, 64 trajectories, peak", 1.71, peak("grpo", 64, 10).speedup),
        ("OPD, 64 trajectories, peak", 1.95, peak("opd", 64, 300).speedup),
        ("ratio of the peak at 64 trajectories", 0.5, peak("grpo", 64, 10).ratio),
        ("OPD, 256 trajectories, r = 1, 10 turns", 1.967, predicted(model, "opd", 256, 10, 1.0)),
        ("OPD, 256 trajectories, r = 1, 300 turns", 1.975, predicted(model, "opd", 256, 300, 1.0)),
    )
    return tuple(Reference(name=name, paper=paper, ours=value) for name, paper, value in ours)
