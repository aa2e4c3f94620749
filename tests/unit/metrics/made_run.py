"""A run folder that was never run: rows and spans with the shape of a real one, drawn from a seed."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from megathunder import tracing
from megathunder.config import Config
from megathunder.metrics.row import MetricsRow, Salt, Sizing
from megathunder.metrics.run_folder import RunFolder, start_run
from megathunder.metrics.sinks import JsonlSink


def made_row(update: int = 0, **changes: object) -> MetricsRow:
    """A row of plausible numbers whose wall is the sum of its parts."""
    noise = random.Random(update)
    reward = min(0.95, 0.4 + 0.014 * update) + noise.uniform(-0.05, 0.05)
    rollout_s, tail_s, suffix_s = 0.9 + noise.random() / 4, 0.05 + noise.random() / 10, 0.18
    values: dict[str, object] = {
        "update": update,
        "schedule": "thundersync",
        "objective": "grpo",
        "policy_version": update,
        "since_start_s": 1.3 * (update + 1),
        "reward_mean": reward,
        "reward_std": 0.4,
        "prompt_reward_min": 0.0,
        "prompt_reward_max": 1.0,
        "prompt_best_mean": min(1.0, reward + 0.2),
        "success_heldout": reward if update % 10 == 9 else None,
        "trajectories": 64,
        "turns_mean": 3.1,
        "response_tokens_mean": 41.5,
        "groups_degenerate": 2,
        "contributions_applied": 64,
        "contributions_dropped": 0,
        "dropped_by_reason": {},
        "trained_tokens": 2656,
        "total_tokens": 8200,
        "wasted_share": 0.12,
        "policy_lag_max": 0,
        "tokens_by_lag": {0: 2656},
        "engine_learner_logprob_diff_max": 3e-6 * (1 + noise.random()),
        "engine_learner_logprob_diff_mean": 4e-7,
        "loss": 0.01,
        "teacher_kl": None,
        "grad_norm": 0.7,
        "learning_rate": 5e-4,
        "stepped": True,
        "skip_reason": "",
        "rollout_s": rollout_s,
        "tail_s": tail_s,
        "suffix_s": suffix_s,
        "step_wall_s": rollout_s + tail_s + suffix_s,
        "publication_s": 0.09,
        "learner_busy_s": 0.8,
        "learner_busy_share": 0.8 / (rollout_s + tail_s + suffix_s),
        "flops": 3.2e10,
        "replay_flops": 0.0,
        "recompute_flops": 0.0,
        "active_mfu": 0.21,
        "compute_mfu": 0.35,
        "publication_bytes": 2_624_000,
        "accumulator_bytes_peak": 21_000_000,
        "host_memory_bytes": 2_100_000_000,
        "memory_peaks": {
            "rollout": {"learner": 900_000_000, "coordinator": 500_000_000, "servers": 1_500_000_000 + update},
            "step": {"learner": 1_100_000_000, "coordinator": 500_000_000},
        },
    }
    return MetricsRow(**{**values, **changes})  # type: ignore[arg-type]


NO_STEP = {
    "stepped": False,
    "skip_reason": "no contribution has a coefficient other than 0",
    "contributions_applied": 0,
    "contributions_dropped": 64,
    "dropped_by_reason": {"equal_rewards": 64},
    "trained_tokens": 0,
    "differentiated_tokens": 1200,
    "loss": None,
    "grad_norm": 0.0,
    "wasted_share": 1.0,
}
"""What a row says of an update that took none."""


def everything(update: int) -> dict[str, object]:
    """Fields of a row of a run that uses all there is: sizes that follow the stragglers, SALT, drafts, placement."""
    noise = random.Random(-update)
    size, multiplier = (8, 4, 4, 8, 16)[update % 5], max(0.0, 4 - update / 5 + noise.random())
    posterior = {g: (1.0 + g * noise.random(), 6.0 + update / 4) for g in (4, 8, 16)}
    seen = {"groups_by_size": {size: 64 // size}, "measured": 64 // size, "straggled": (update + 3) % 4}
    cancellation, drafted = 0.2 + 0.2 * noise.random(), 900 + 20 * update
    spectrum = (0.5, 0.2, 0.1 * noise.random())
    return {
        "sizing": Sizing(**seen, chosen=size, price=multiplier, multiplier=multiplier, posterior=posterior),
        "salt": Salt(
            geometries=6,
            cancellation=cancellation,
            cancellation_max=cancellation + 0.25,
            factor=1.02,
            factor_max=1.3 if cancellation > 0.25 else 1.0,
            rank=1.5,
            spectrum=spectrum,
        ),
        "speculation_accept_length": 1.4 + update / 20,
        "speculation_drafted_tokens": drafted,
        "speculation_accepted_tokens": drafted // 2,
        "speculation_off_share": 0.3 * noise.random(),
        "context_tokens": 20_000,
        "cached_tokens": 9_000 + 200 * update,
    }


def made_run(
    parent: Path,
    *,
    updates: int = 24,
    cells: int = 2,
    sync: bool = False,
    used: bool = False,
    idle: tuple[int, ...] = (),
    model: str = "",
) -> RunFolder:
    """Write `runs/made` with `updates` rows and the events of four updates; `used`: everything there is, `idle`:
    updates without a step, `model`: the policy's folder."""
    config = Config()
    if model:
        config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, model=model))
    if used:
        speculation = dataclasses.replace(config.rollout, speculation="suffix", servers=2)
        salt = dataclasses.replace(config.salt, amplification=1.0)
        config = dataclasses.replace(config, rollout=speculation, salt=salt)
    run = dataclasses.replace(config.run, name="made", folder=str(parent), updates=updates)
    folder = start_run(dataclasses.replace(config, run=run, schedule="sync" if sync else "thundersync"))
    sink = JsonlSink(folder.metrics)
    for update in range(updates):
        sink.row(made_row(update, **(everything(update) if used else {}), **(NO_STEP if update in idle else {})))
    sink.close()
    recorder = tracing.Recorder(folder.events)
    recorder.write(tracing.RUN_LANE, "start", 0.0, 0.0)
    at_s = 100.0
    for update in range(max(0, updates - 4), updates):
        at_s = _write_update(recorder, update, at_s, cells, sync)
    recorder.close()
    return folder


def _write_update(recorder: tracing.Recorder, update: int, start_s: float, cells: int, sync: bool) -> float:
    noise = random.Random(update)
    free_s = [start_s] * 16
    ready = []
    for trajectory in range(48):
        slot = free_s.index(min(free_s))
        begin = at = free_s[slot]
        lane = tracing.rollout_lane(trajectory)
        for turn in range(noise.randint(2, 5)):
            took = noise.uniform(0.02, 0.06)
            recorder.write(lane, "turn", at, at + took, update=update, turn=turn)
            at += took + min(noise.lognormvariate(-3.4, 1.2), 0.7)
        recorder.write(lane, "trajectory", begin, at, update=update)
        free_s[slot] = at
        ready.append(at)
    last_s = max(ready)
    cell_free = [start_s] * cells
    for number, at in enumerate(sorted(ready)):
        cell = cell_free.index(min(cell_free))
        begin = max(cell_free[cell], last_s if sync else at)
        cell_free[cell] = begin + noise.uniform(0.025, 0.05)
        recorder.write(tracing.learner_lane(cell), "differentiate", begin, cell_free[cell], update=update)
        if number % 8 == 7:
            recorder.write(tracing.learner_lane(cell), "fold", cell_free[cell], cell_free[cell] + 0.01, update=update)
            cell_free[cell] += 0.01
    learned_s = max(cell_free)
    for cell in range(cells):
        recorder.write(tracing.learner_lane(cell), "step", learned_s, learned_s + 0.05, update=update)
    recorder.write(tracing.learner_lane(0), "publish", learned_s + 0.05, learned_s + 0.17, update=update)
    for name, begin, end in (
        ("rollout", start_s, last_s),
        ("tail", last_s, learned_s),
        ("suffix", learned_s, learned_s + 0.17),
    ):
        recorder.write(tracing.UPDATE_LANE, name, begin, end, update=update)
    return learned_s + 0.17
