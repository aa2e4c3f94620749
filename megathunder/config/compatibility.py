"""Which objectives, schedules, releases, accumulators and shared prompts go together.

    release         shared_prompt             objective   accumulator
    trajectory      off | packed | group (1)  any         fp32; exact with shared_prompt = off
    turn            off                       opd         any
    turn_forward    off                       any         any
    replicas coupled by experts: release = trajectory, shared_prompt = off      (1) one replica per cell

The one place that says so: the checks before a run and `--plan` call `check_compatibility`, the objectives' builder and
the learner's gradient runner the part of it that concerns them. Raises ConfigError at the first rule that is broken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.registry import SCHEDULES

DELAYED = "one_step_off"
KNOWN_COEFFICIENTS = ("sync", "periodic_async", DELAYED)
"""Schedules under which a trajectory's advantage is known before its backward pass."""


class Conflict(NamedTuple):
    """Settings that do not go together: what was seen, what is legal, what to do."""

    seen: str
    expected: str
    remedy: str


def check_compatibility(config: Config) -> None:
    """Raise ConfigError at the first conflict."""
    _raise_first(conflicts(config))


def check_objective(config: Config) -> None:
    """What concerns the objective alone, whatever the schedule."""
    _raise_first(_objective_conflicts(config))


def check_learner_release(config: Config) -> None:
    """What concerns the learner's passes alone, whatever the objective and the schedule."""
    _raise_first(_prompt_conflicts(config))
    _raise_first(_replica_conflicts(config))


def conflicts(config: Config) -> Iterator[Conflict]:
    """Every conflict of `config`."""
    yield from _objective_conflicts(config)
    yield from _schedule_conflicts(config)
    yield from _clip_conflicts(config)
    yield from _prompt_conflicts(config)
    yield from _replica_conflicts(config)
    yield from _kl_conflicts(config)
    yield from _salt_conflicts(config)


def _objective_conflicts(config: Config) -> Iterator[Conflict]:
    streaming, release = config.streaming, config.streaming.release
    if config.objective == "grpo" and release == "turn":
        yield Conflict(
            "streaming.release = 'turn' with objective = 'grpo'",
            "'trajectory' or 'turn_forward': no turn has a coefficient before the trajectory has a reward",
            "set streaming.release = 'turn_forward' to work on turns as they arrive",
        )
    if config.objective == "opd" and streaming.content_ready:
        yield Conflict(
            "streaming.content_ready = true with objective = 'opd'",
            "false: distillation waits for no reward, so there is nothing to start ahead of",
            "set streaming.content_ready = false",
        )
    if config.objective == "opd" and config.loss.normalisation == "sequence_mean" and release == "turn":
        yield Conflict(
            "loss.normalisation = 'sequence_mean' with streaming.release = 'turn'",
            "a weight that is known when a turn is released; 1/length needs the whole trajectory",
            "set loss.normalisation = 'token_mean', or streaming.release = 'turn_forward' or 'trajectory'",
        )
    if config.objective == "opd" and streaming.on_lost == "drop_group":
        yield Conflict(
            "streaming.on_lost = 'drop_group' with objective = 'opd'",
            "'shrink' or 'fail': attempts are independent and scored turns stay in the sum",
            "set streaming.on_lost = 'shrink'",
        )


def _schedule_conflicts(config: Config) -> Iterator[Conflict]:
    streaming, release = config.streaming, config.streaming.release
    if SCHEDULES.get(config.schedule).samples_ahead and (release != "trajectory" or streaming.content_ready):
        yield Conflict(
            f"schedule = {config.schedule!r} with streaming.release = {release!r}, content_ready = "
            f"{streaming.content_ready}",
            "release = 'trajectory', content_ready = false: activations kept from before the step are stale",
            "set streaming.release = 'trajectory' and content_ready = false, or schedule = 'thundersync'",
        )


def _clip_conflicts(config: Config) -> Iterator[Conflict]:
    grpo = config.grpo
    if config.objective != "grpo" or not (grpo.clip_low or grpo.clip_high):
        return
    seen = f"grpo.clip_low/clip_high = {grpo.clip_low}/{grpo.clip_high}"
    if grpo.importance_cap:
        yield Conflict(
            f"{seen} with grpo.importance_cap = {grpo.importance_cap}",
            "one correction of the ratio, clipped or truncated",
            "set grpo.importance_cap = 0, or both clips to 0",
        )
    if SCHEDULES.get(config.schedule).opens_groups:
        yield Conflict(
            f"{seen} with schedule = {config.schedule!r}",
            f"{', '.join(KNOWN_COEFFICIENTS)}: the sign of the advantage, known at the backward pass, decides on which "
            "side a ratio is clipped",
            f"set both clips to 0 (without lag every ratio is 1), or schedule = {DELAYED!r}",
        )
    if config.learner.accumulator == "exact":
        yield Conflict(
            f"{seen} with learner.accumulator = 'exact'",
            "'fp32': exact sums take the advantage as a factor after the backward pass",
            "set learner.accumulator = 'fp32', or both clips to 0",
        )


def _prompt_conflicts(config: Config) -> Iterator[Conflict]:
    release, prompt = config.streaming.release, config.learner.shared_prompt
    if release != "trajectory" and prompt != "off":
        yield Conflict(
            f"streaming.release = {release!r} with learner.shared_prompt = {prompt!r}",
            "shared prompts with release = 'trajectory': turns already keep their own context",
            "set learner.shared_prompt = 'off' or streaming.release = 'trajectory'",
        )
    if config.learner.accumulator == "exact" and prompt != "off":
        yield Conflict(
            f"learner.accumulator = 'exact' with learner.shared_prompt = {prompt!r}",
            "shared_prompt = 'off': what rows owe to a common prompt adds up in floating point",
            "set learner.shared_prompt = 'off'",
        )


def _replica_conflicts(config: Config) -> Iterator[Conflict]:
    learner, release, prompt = config.learner, config.streaming.release, config.learner.shared_prompt
    if learner.experts_couple_replicas and (release != "trajectory" or prompt != "off"):
        yield Conflict(
            f"learner.expert_parallel = {learner.expert_parallel} over {learner.replicas_per_cell} replicas with "
            f"streaming.release = {release!r}, learner.shared_prompt = {prompt!r}",
            "whole trajectories without shared prompts: coupled replicas must run the same number of passes",
            "set streaming.release = 'trajectory' and learner.shared_prompt = 'off', or learner.expert_parallel = 1",
        )
    if learner.replicas_per_cell > 1 and prompt == "group":
        yield Conflict(
            f"learner.shared_prompt = 'group' in cells of {learner.replicas_per_cell} replicas "
            f"(learner.accumulator_shards = {learner.accumulator_shards})",
            "one replica per cell: a held prompt waits for all trajectories of its group",
            "set learner.shared_prompt = 'packed', or learner.accumulator_shards = 1",
        )


def _kl_conflicts(config: Config) -> Iterator[Conflict]:
    """The KL term is added with a trajectory's backward pass and cannot be taken back."""
    grpo, streaming = config.grpo, config.streaming
    for seen, wrong in (
        ("grpo.dynamic_sampling = true", grpo.dynamic_sampling),
        ("streaming.content_ready = true", streaming.content_ready),
        ("streaming.on_lost = 'drop_group'", streaming.on_lost == "drop_group"),
        (f"streaming.release = {streaming.release!r}", streaming.release != "trajectory"),
        ("learner.shared_prompt = 'group'", config.learner.shared_prompt == "group"),
    ):
        if config.objective == "grpo" and grpo.kl_coefficient and not grpo.kl_in_reward and wrong:
            yield Conflict(
                f"grpo.kl_coefficient = {grpo.kl_coefficient} with {seen}",
                "whole trajectories that stay in the batch: a divergence is added with the backward pass",
                f"set grpo.kl_coefficient = 0, or change {seen.split(' = ')[0]}",
            )


def _salt_conflicts(config: Config) -> Iterator[Conflict]:
    """SALT needs each trajectory's whole gradient, with nothing owed to others, in one rank's accumulator."""
    salt, grpo, learner = config.salt, config.grpo, config.learner
    split = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "accumulator_shards")
    for seen, wrong in (
        (f"objective = {config.objective!r}", config.objective != "grpo"),
        (f"grpo.clip_low/clip_high = {grpo.clip_low}/{grpo.clip_high}", grpo.clip_low or grpo.clip_high),
        ("learner.shared_prompt = 'group'", learner.shared_prompt == "group"),
        *((f"learner.{name} = {getattr(learner, name)}", getattr(learner, name) > 1) for name in split),
    ):
        if salt.active and wrong:
            yield Conflict(
                f"salt.amplification = {salt.amplification}, measure = {str(salt.measure).lower()} with {seen}",
                "GRPO without clipping, on learner ranks that each hold a trajectory's whole gradient",
                f"set salt.amplification = 0 and measure = false, or change {seen.split(' = ')[0]}",
            )
    if salt.active and salt.scope == "batch" and config.streaming.max_open_groups < config.prompts_at_most:
        yield Conflict(
            f"salt.scope = 'batch' with streaming.max_open_groups = {config.streaming.max_open_groups}",
            f"room for all {config.prompts_at_most} groups of an update until it ends",
            f"set streaming.max_open_groups = {config.prompts_at_most}, or salt.scope = 'group'",
        )


def _raise_first(found: Iterator[Conflict]) -> None:
    for conflict in found:
        raise ConfigError(conflict.seen, expected=conflict.expected, remedy=conflict.remedy)
