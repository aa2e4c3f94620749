"""Checks of what settings mean together: objective, schedule, data and lengths. Called by `checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

from megathunder.config.root import Config
from megathunder.config.tasks import check_kinds
from megathunder.errors import ConfigError
from megathunder.registry import OBJECTIVES, SCHEDULES

LEASE_GRACE_S = 30.0  # of a sandbox beyond what runs in it: waiting for places, copies


def check_objective_and_schedule(config: Config) -> None:
    """The objective exists, and so does all that it needs of the other settings."""
    OBJECTIVES.get(config.objective)(config).check(config)
    SCHEDULES.get(config.schedule)


def check_teacher_temperature(config: Config) -> None:
    """A divergence compares two distributions at one temperature; a teacher's scores are those at 1."""
    if config.objective == "opd" and config.rollout.temperature != 1.0:
        raise ConfigError(
            f"rollout.temperature = {config.rollout.temperature} with objective = 'opd'",
            expected="1: the teacher's log-probabilities are those at temperature 1, and the student's must be too",
            remedy="set rollout.temperature = 1.0",
        )


def check_group_control(config: Config) -> None:
    sagc, first = config.sagc, config.run.group_size
    if config.run.group_control != "sagc":
        return
    if config.objective != "grpo":
        raise ConfigError(
            f"run.group_control = 'sagc' with objective = {config.objective!r}",
            expected="'grpo': attempts of a distillation are independent, nobody waits for a group",
            remedy="set run.group_control = 'fixed'",
        )
    if list(sagc.sizes) != sorted(set(sagc.sizes)) or not sagc.sizes or sagc.sizes[0] < 2:
        raise ConfigError(
            f"sagc.sizes = {list(sagc.sizes)}",
            expected="different sizes, ascending, each at least 2",
            remedy="set sagc.sizes = [4, 8, 16]",
        )
    if first not in sagc.sizes:
        near = min(sagc.sizes, key=lambda size: abs(size - first))
        raise ConfigError(
            f"run.group_size = {first}, sagc.sizes = {list(sagc.sizes)}",
            expected="a first size that is on the ladder",
            remedy=f"set run.group_size = {near}, or add {first} to sagc.sizes",
        )


def check_salt_batch_scope(config: Config, ranks: int) -> None:
    """Cells see each other's gradients at the barrier alone, and there only what is small."""
    salt = config.salt
    if salt.active and salt.scope == "batch" and salt.features == "exact" and ranks > 1:
        raise ConfigError(
            f"salt.scope = 'batch', features = 'exact' on {ranks} learner ranks",
            expected="sketches, which ranks exchange at the barrier: whole gradients of two ranks never meet",
            remedy="set salt.features = 'sketch', or salt.scope = 'group'",
        )


def check_ratio_limits(config: Config) -> None:
    grpo = config.grpo
    if grpo.clip_low >= 1:
        raise ConfigError(
            f"grpo.clip_low = {grpo.clip_low}",
            expected="below 1: ratios are positive, so a lower limit of 1 - clip_low <= 0 clips nothing",
            remedy="set it to 0.2, or 0 for none",
        )
    if 0 < grpo.importance_cap < 1:
        raise ConfigError(
            f"grpo.importance_cap = {grpo.importance_cap}",
            expected="0 (weight 1) or at least 1: a lower cap shrinks tokens on which engine and learner agree",
            remedy="set it to 2.0",
        )


def check_penalties(config: Config) -> None:
    grpo, rollout = config.grpo, config.rollout
    if grpo.dynamic_sampling and not grpo.max_replacements:
        raise ConfigError(
            "grpo.dynamic_sampling = true with grpo.max_replacements = 0",
            expected="at least 1 group that may be drawn again",
            remedy=f"set grpo.max_replacements = {config.run.groups_per_update}, or dynamic_sampling = false",
        )
    if grpo.overlong_buffer_tokens >= rollout.max_tokens:
        raise ConfigError(
            f"grpo.overlong_buffer_tokens = {grpo.overlong_buffer_tokens}, rollout.max_tokens = {rollout.max_tokens}",
            expected="a buffer shorter than the trajectory",
            remedy=f"set grpo.overlong_buffer_tokens = {rollout.max_tokens // 4}",
        )
    if grpo.kl_in_reward and not grpo.kl_coefficient:
        raise ConfigError(
            "grpo.kl_in_reward = true with grpo.kl_coefficient = 0",
            expected="a positive weight of the KL term",
            remedy="set grpo.kl_in_reward = false",
        )


def check_task_kinds(config: Config) -> None:
    check_kinds(config.tasks)


def check_batch_size(config: Config) -> None:
    need, size = config.prompts_at_most, config.tasks.size
    if need > size and not config.tasks.wrap:
        raise ConfigError(
            f"run.groups_per_update = {need} prompts an update, tasks.size = {size} tasks, tasks.wrap = false",
            expected=f"at most {size} prompts an update",
            remedy=f"set run.groups_per_update = {size}, raise tasks.size to {need}, or set tasks.wrap = true",
        )
    if config.run.evaluate_every and not config.tasks.heldout:
        raise ConfigError(
            f"run.evaluate_every = {config.run.evaluate_every} with tasks.heldout = 0",
            expected="held-out tasks to evaluate on",
            remedy="set run.evaluate_every = 0, or tasks.heldout = 64 to hold tasks out",
        )


def check_sandbox_lifetime(config: Config) -> None:
    """A lease ends by itself after its lifetime: never while its trajectory may still run or be graded."""
    sandbox = config.sandbox
    needed_s = config.rollout.deadline_s + sandbox.grading_budget_s + LEASE_GRACE_S
    if sandbox.lifetime_s < needed_s:
        raise ConfigError(
            f"sandbox.lifetime_s = {sandbox.lifetime_s:g} with rollout.deadline_s = {config.rollout.deadline_s:g} and "
            f"sandbox.grading_budget_s = {sandbox.grading_budget_s:g}",
            expected=f"at least their sum and {LEASE_GRACE_S:g} s for leases and copies",
            remedy=f"set sandbox.lifetime_s = {needed_s:g} or more, or lower the deadline",
        )


def check_lengths(config: Config) -> None:
    rollout, pack = config.rollout, config.streaming.pack_tokens
    if rollout.max_new_tokens >= rollout.max_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens = {rollout.max_new_tokens}, rollout.max_tokens = {rollout.max_tokens}",
            expected="a turn shorter than its trajectory, prompt included",
            remedy=f"set rollout.max_tokens = {4 * rollout.max_new_tokens} or more",
        )
    if rollout.max_tokens > pack:
        raise ConfigError(
            f"rollout.max_tokens = {rollout.max_tokens}, streaming.pack_tokens = {pack}",
            expected="a micro-batch that holds the longest trajectory",
            remedy=f"set streaming.pack_tokens = {rollout.max_tokens}, or rollout.max_tokens = {pack}",
        )
    if rollout.max_tokens > rollout.max_total_tokens:
        raise ConfigError(
            f"rollout.max_tokens = {rollout.max_tokens}, rollout.max_total_tokens = {rollout.max_total_tokens}",
            expected="a key-value cache that holds the longest trajectory",
            remedy=f"set rollout.max_total_tokens = {16 * rollout.max_tokens}",
        )


def remarks(config: Config) -> Iterator[str]:
    """What is legal and may not do what was meant."""
    grpo, rollout, learner = config.grpo, config.rollout, config.learner
    turns, produced = config.tasks.max_turns, config.tasks.max_turns * rollout.max_new_tokens
    if produced > rollout.max_tokens:
        yield (
            f"{turns} turns of {rollout.max_new_tokens} tokens may exceed rollout.max_tokens = {rollout.max_tokens}; "
            "such a trajectory ends as max_tokens"
        )
    if rollout.top_p < 1:
        yield f"rollout.top_p = {rollout.top_p}: sampled from a cut distribution, trained on the whole one"
    if learner.accumulator == "exact" and learner.dtype == "bfloat16":
        yield (
            "learner.accumulator = 'exact' with bfloat16: each sum is exact, but another packing rounds the forward "
            "pass differently; bytes are equal for equal packings only"
        )
    if config.schedule != "one_step_off" and (grpo.clip_low or grpo.clip_high):
        yield "grpo.clip_low/clip_high act where ratios differ from 1; under an exact schedule every ratio is 1"
    if config.schedule == "one_step_off" and not (grpo.clip_low or grpo.clip_high or grpo.importance_cap):
        yield "schedule = 'one_step_off' trains on tokens one version old, with no correction of the ratio"
    if config.schedule == "sync" and config.streaming.content_ready:
        yield "streaming.content_ready has no effect under schedule = 'sync', which waits for the whole batch"
    if config.tasks.size < config.run.groups_per_update:
        yield f"an update draws {config.run.groups_per_update} prompts of {config.tasks.size} tasks: some come twice"
