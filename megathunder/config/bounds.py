"""The range of every number: nothing negative, and more than zero where zero has no meaning. Called by `checks.py`."""

from __future__ import annotations

import math

from megathunder.config.root import Config
from megathunder.config.toml import settings
from megathunder.errors import ConfigError

_POSITIVE = """
    run.updates run.groups_per_update run.group_size run.evaluate_attempts run.keep_checkpoints run.stop_timeout_s
    tasks.size tasks.max_turns
    sandbox.command_timeout_s sandbox.cpu_s sandbox.processes sandbox.memory_mb sandbox.disk_mb sandbox.inodes
    sandbox.output_bytes sandbox.max_running sandbox.max_open sandbox.grading_budget_s sandbox.lifetime_s
    rollout.servers rollout.temperature rollout.top_p rollout.max_new_tokens rollout.max_tokens
    rollout.observation_characters rollout.max_concurrent rollout.deadline_s rollout.request_timeout_s
    rollout.startup_timeout_s rollout.max_total_tokens rollout.max_running_requests
    placement.cache_share placement.spill_gap
    speculation.max_draft_tokens speculation.cache_tokens speculation.low_load_requests speculation.high_load_requests
    speculation.load_every_s
    loss.constant
    salt.sketch_dimension
    sagc.dual_step sagc.prior_straggled sagc.prior_steady sagc.prompt_strength
    streaming.pack_tokens streaming.pack_rows streaming.max_open_groups streaming.reward_values
    streaming.max_per_trajectory_accumulators streaming.stall_timeout_s
    learner.tensor_parallel learner.pipeline_parallel learner.expert_parallel learner.context_parallel
    learner.virtual_pipeline learner.accumulator_shards learner.collective_timeout_s
    learner.learning_rate learner.adam_epsilon learner.exact_range learner.max_bad_updates
    publish.bucket_mb publish.timeout_s publish.min_servers
    metrics.timeline_updates hardware.gpus_per_node
    replay.speed
"""
POSITIVE = frozenset(_POSITIVE.split())
AT_MOST = {
    "rollout.top_p": 1.0,
    "placement.cache_share": 1.0,
    "rollout.port": 65535.0,
    "tasks.heldout": 8192.0,  # made and sampled at every evaluation; making takes a millisecond each
    "tasks.size": 1048576.0,  # made when the run starts, a tenth of a millisecond each
    "salt.sketch_dimension": 1048576.0,  # 4 MiB a trajectory; products err by a thousandth of the norms
    "learner.adam_beta1": 0.999999,
    "learner.adam_beta2": 0.999999,
}


def check_ranges(config: Config) -> None:
    """Every int and float setting is finite, not negative, above 0 if in POSITIVE, and at most its AT_MOST."""
    for name, kind in settings().items():
        if kind not in (int, float):
            continue
        section, _, key = name.partition(".")
        value = getattr(getattr(config, section), key)
        positive, most = name in POSITIVE, AT_MOST.get(name, math.inf)
        if math.isfinite(value) and (value > 0 if positive else value >= 0) and value <= most:
            continue
        floor = "more than 0" if positive else "0 or more"
        if not math.isfinite(value):
            floor = f"a finite number, {floor}"
        default = getattr(getattr(Config(), section), key)
        raise ConfigError(
            f"{name} = {value}",
            expected=f"{floor}, at most {most:g}" if most < math.inf else floor,
            remedy=f"set it in that range; the default is {default}",
        )
