"""Every check across rooms that needs no engine: `check(config)` runs them in order before anything expensive starts.

A check is a function from the configuration to None that raises ConfigError (seen, expected, remedy). Checks read only
configuration files, the process's core set and the file system, and ask a Docker daemon or sandbox servers, where there
should be some, whether they are there: well under a second together. Call `check` once, in the process that starts the
others, before the run folder is made; for a plan `check_plan`, which asks nothing of this machine and needs no weights.
"""

from __future__ import annotations

import os

from megathunder.config import (
    cross_checks,
    machine_checks,
    model_checks,
    sandbox_checks,
    speculation_checks,
)
from megathunder.config.compatibility import check_compatibility
from megathunder.config.layout_checks import check_layout
from megathunder.config.pass_through import check_passed_names
from megathunder.config.ranges import check_ranges
from megathunder.config.root import Config

SETTINGS_CHECKS = (
    check_ranges,
    cross_checks.check_group_control,
    cross_checks.check_ratio_limits,
    check_compatibility,
    cross_checks.check_objective_and_schedule,
    cross_checks.check_teacher_temperature,
    cross_checks.check_penalties,
    cross_checks.check_task_kinds,
    cross_checks.check_batch_size,
    cross_checks.check_lengths,
    cross_checks.check_sandbox_lifetime,
    model_checks.check_models,
    model_checks.check_teacher,
    machine_checks.check_gpu_name,
    machine_checks.check_server_urls,
    machine_checks.check_server_count,
    machine_checks.check_delta_checksum,
    machine_checks.check_adapter_publication,
    speculation_checks.check_speculation,
)
MACHINE_CHECKS = (
    machine_checks.check_run_folder,
    model_checks.check_model_folders,
    model_checks.check_teacher_folder,
    sandbox_checks.check_sandbox_installed,
    sandbox_checks.check_docker_sdk,
    machine_checks.check_harness_exists,
    machine_checks.check_task_files,
    machine_checks.check_sinks,
    machine_checks.check_router_installed,
    speculation_checks.check_speculation_plugin,
    machine_checks.check_cpu_cores,
    machine_checks.check_devices,
    machine_checks.check_kernels,
    check_passed_names,
    machine_checks.check_server_exposure,
    machine_checks.check_ports,
    machine_checks.check_publish_folder,
    sandbox_checks.check_sandbox_servers,
)
CHECKS = SETTINGS_CHECKS + MACHINE_CHECKS

SAMPLING_CHECKS = frozenset(
    (
        cross_checks.check_task_kinds,
        cross_checks.check_batch_size,
        model_checks.check_teacher,
        model_checks.check_teacher_folder,
        sandbox_checks.check_sandbox_installed,
        sandbox_checks.check_docker_sdk,
        sandbox_checks.check_sandbox_servers,
        machine_checks.check_harness_exists,
        machine_checks.check_task_files,
        machine_checks.check_router_installed,
        machine_checks.check_server_exposure,
        machine_checks.check_server_urls,
        machine_checks.check_server_count,
        machine_checks.check_ports,
        speculation_checks.check_speculation_plugin,
    )
)
"""Checks of engines, sandboxes and tasks, which a run on recorded trajectories has none of."""


def check(config: Config, *, ranks: int = 0, samples: bool = True) -> None:
    """Raise ConfigError at the first check that `config` fails. `ranks`: learner processes; 0: torchrun's count.
    `samples`: trajectories come from servers, not from a recording."""
    for validate in CHECKS:
        if samples or validate not in SAMPLING_CHECKS:
            validate(config)
    started = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    machine_checks.check_rank_count(config, started)
    check_layout(config, started)
    cross_checks.check_salt_batch_scope(config, started)


def check_plan(config: Config, *, ranks: int) -> None:
    """The same for a run of `ranks` learner processes that is only planned: the settings among themselves."""
    for validate in SETTINGS_CHECKS:
        validate(config)
    check_layout(config, ranks)
    cross_checks.check_salt_batch_scope(config, ranks)


def notes(config: Config) -> list[str]:
    """Remarks on settings that work and may not do what was meant; printed with the plan."""
    return list(cross_checks.remarks(config))
