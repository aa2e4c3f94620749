"""Beyond this machine: how to split GPUs between rollout and learner, and what step time to expect.

Stated cost model (every number is an argument; none is measured here):
    decode step     max(weights + keys and values over HBM bandwidth, 2 N b FLOP over peak), by `decode_efficiency`
    trajectory      turns x (action tokens x decode step + tool time), prefill of new tokens at `learner_mfu`
    rollout         the longest of B lognormal trajectories (midpoint quantile), all concurrent
    learner         6 N FLOP a token over g_learner x peak x `learner_mfu`
    suffix          bf16 weights over `link_bytes_s` once, plus `step_s`
    speed-up        release model of the durations' midpoint quantiles (GRPO: trajectories, OPD: turns)
    memory          learner 18 bytes a parameter over its GPUs; a rollout replica holds the weights twice over
N is the active parameter count for FLOP and the total for memory. Called by tools/simulate.py. Refuses a model that
fits on no split, and an unknown GPU, by name.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megathunder.errors import UserError
from megathunder.hardware import Gpu
from megathunder.simulator.release_model import (
    ReleaseCurve,
    lognormal_midpoints,
    speedup,
    trajectory_releases,
    turn_releases,
)

LEARNER_BYTES_PER_PARAMETER = 18.0
USABLE_MEMORY = 0.85
MAY_BE_0 = frozenset(("gpus", "prompt_tokens", "observation_tokens", "tool_s", "spread", "step_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked. Parameters in units; times in seconds."""

    parameters: float
    active_parameters: float
    gpu: Gpu
    gpus: int
    by_turn: bool = False  # work is released turn by turn (on-policy distillation)
    trajectories: int = 256
    turns: int = 20
    prompt_tokens: int = 2000
    action_tokens: int = 200
    observation_tokens: int = 400
    tool_s: float = 5.0
    spread: float = 0.5
    kv_bytes_per_token: float = 131072.0
    learner_mfu: float = 0.4
    decode_efficiency: float = 0.5
    link_bytes_s: float = 20e9
    step_s: float = 2.0

    @property
    def tokens_per_trajectory(self) -> int:
        return self.prompt_tokens + self.turns * (self.action_tokens + self.observation_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One division of the GPUs. `fits` says whether the learner's state and the replicas' weights find room."""

    rollout_gpus: int
    learner_gpus: int
    replicas: int
    rollout_s: float
    learner_s: float
    tail_s: float
    suffix_s: float
    sync_step_s: float
    thundersync_step_s: float
    speedup: float
    fits: bool


def plan(request: PlanRequest) -> list[Split]:
    """Every split that fits, fastest thundersync step first; UserError where none fits, and for a number that is none
    of its kind."""
    _refuse_nonsense(request)
    splits = [_split(request, learner) for learner in range(1, request.gpus)]
    fitting = sorted((s for s in splits if s.fits), key=lambda s: s.thundersync_step_s)
    if not fitting:
        need = LEARNER_BYTES_PER_PARAMETER * request.parameters / (USABLE_MEMORY * request.gpu.memory_bytes)
        raise UserError(
            f"{request.parameters / 1e9:.1f}B parameters on {request.gpus} {request.gpu.name}",
            expected=f"at least {math.ceil(need)} learner GPUs and {_replica_gpus(request)} rollout GPUs",
            remedy="add GPUs, take ones with more memory, or train adapters only",
        )
    return fitting


def _refuse_nonsense(request: PlanRequest) -> None:
    for name, value in ((field.name, getattr(request, field.name)) for field in dataclasses.fields(request)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value < math.inf or (value == 0 and name not in MAY_BE_0):
            raise UserError(
                f"{name} is {value:g}",
                expected=f"a finite number {'not below' if name in MAY_BE_0 else 'above'} 0",
                remedy=f"give --{name.replace('_', '-')} such a number; --help shows the defaults",
            )
    if request.active_parameters > request.parameters:
        raise UserError(
            f"active_parameters is {request.active_parameters:g}, parameters {request.parameters:g}",
            expected="no more parameters used by a token than there are",
            remedy="give --parameters all of them; --active-parameters 0 is all of them too",
        )


def _replica_gpus(request: PlanRequest) -> int:
    """GPUs one rollout replica takes: its weights in half of the memory, the rest for keys and values."""
    return max(1, math.ceil(2.0 * request.parameters / (0.5 * request.gpu.memory_bytes)))


def _split(request: PlanRequest, learner_gpus: int) -> Split:
    rollout_gpus = request.gpus - learner_gpus
    width = _replica_gpus(request)
    replicas = rollout_gpus // width
    state = LEARNER_BYTES_PER_PARAMETER * request.parameters / learner_gpus
    fits = replicas > 0 and state <= USABLE_MEMORY * request.gpu.memory_bytes
    median_s = _trajectory_s(request, max(replicas, 1), width)
    durations = lognormal_midpoints(request.trajectories, request.spread)
    rollout_s = median_s / durations[len(durations) // 2]
    tokens = request.trajectories * request.tokens_per_trajectory
    learner_s = 6.0 * request.active_parameters * tokens / (learner_gpus * request.gpu.flops * request.learner_mfu)
    suffix_s = 2.0 * request.parameters / request.link_bytes_s + request.step_s
    releases = turn_releases(durations, request.turns) if request.by_turn else trajectory_releases(durations)
    rho = learner_s / rollout_s
    tail = ReleaseCurve(releases).tail(rho)
    return Split(
        rollout_gpus=rollout_gpus,
        learner_gpus=learner_gpus,
        replicas=replicas,
        rollout_s=rollout_s,
        learner_s=learner_s,
        tail_s=tail * rollout_s,
        suffix_s=suffix_s,
        sync_step_s=rollout_s + learner_s + suffix_s,
        thundersync_step_s=rollout_s * (1.0 + tail) + suffix_s,
        speedup=speedup(rho, tail, suffix_s / rollout_s),
        fits=fits,
    )


def _trajectory_s(request: PlanRequest, replicas: int, width: int) -> float:
    """Median trajectory: decoding with its share of the batch beside it, prefill of new tokens, tools."""
    gpu = request.gpu
    sharing = request.trajectories / replicas
    step_s = 0.0
    for _ in range(20):  # the share of trajectories that decode at once depends on how long decoding takes
        decode_s = request.turns * request.action_tokens * step_s
        busy = decode_s / (decode_s + request.turns * request.tool_s) if decode_s else 1.0
        running = max(1.0, sharing * busy)
        kept = running * request.kv_bytes_per_token * request.tokens_per_trajectory / 2.0
        memory_s = (2.0 * request.parameters + kept) / (width * gpu.bandwidth_bytes_s)
        compute_s = 2.0 * request.active_parameters * running / (width * gpu.flops)
        step_s = max(memory_s, compute_s) / request.decode_efficiency
    new_tokens = request.prompt_tokens + request.turns * request.observation_tokens
    prefill = 2.0 * request.active_parameters * new_tokens * sharing / (width * gpu.flops * request.learner_mfu)
    return request.turns * (request.action_tokens * step_s + request.tool_s) + prefill
