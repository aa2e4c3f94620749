"""Every check across rooms that needs no engine: `check(config)` runs them in order before anything expensive starts.

A law is a function from the configuration to None that raises ConfigError (seen, expected, remedy). Laws read only
configuration files, the process's core set and the file system, and ask a Docker daemon or sandbox servers, where there
should be some, whether they are there: well under a second together. Call `check` once, in the process that starts the
others, before the run folder is made; for a plan `check_plan`, which asks nothing of this machine and needs no weights.
"""

from __future__ import annotations

import os

from megathunder.config import (
    comparison_checks,
    cross_checks,
    machine_checks,
    model_checks,
    sandbox_checks,
    speculation_checks,
)
from megathunder.config.bounds import numbers_are_in_range
from megathunder.config.pass_through import passed_names_exist
from megathunder.config.root import Config

LAWS_OF_SETTINGS = (
    numbers_are_in_range,
    cross_checks.groups_carry_a_signal,
    cross_checks.group_sizes_make_a_ladder,
    cross_checks.gradients_can_be_kept_apart,
    cross_checks.ratios_have_one_correction,
    cross_checks.release_fits_the_objective,
    cross_checks.penalties_have_what_they_need,
    comparison_checks.compared_variants_are_legal,
    comparison_checks.plain_rollouts_are_others,
    cross_checks.a_replay_has_a_recording,
    cross_checks.tasks_are_of_known_kinds,
    cross_checks.the_batch_fits_the_tasks,
    cross_checks.lengths_fit_each_other,
    cross_checks.sandboxes_outlive_their_trajectories,
    model_checks.models_are_described_and_agree,
    machine_checks.the_gpu_is_known,
    machine_checks.servers_have_addresses,
    machine_checks.enough_servers,
    machine_checks.changes_are_acknowledged,
    machine_checks.adapters_can_be_published,
    speculation_checks.drafts_fit_the_servers,
)
LAWS_OF_THE_MACHINE = (
    machine_checks.the_run_folder_is_free,
    model_checks.model_folders_are_whole,
    sandbox_checks.the_sandbox_is_installed,
    sandbox_checks.containers_can_be_asked_for,
    machine_checks.the_harness_is_there,
    machine_checks.the_tasks_are_there,
    machine_checks.wandb_is_installed,
    machine_checks.the_router_is_installed,
    speculation_checks.the_plug_in_is_installed,
    machine_checks.cores_exist,
    machine_checks.devices_exist,
    machine_checks.kernels_are_installed,
    passed_names_exist,
    machine_checks.servers_are_not_open_to_the_network,
    machine_checks.ports_are_free,
    machine_checks.the_shared_folder_can_be_written,
    sandbox_checks.the_sandboxes_answer,
)
LAWS = LAWS_OF_SETTINGS + LAWS_OF_THE_MACHINE

OF_SAMPLING = frozenset(
    (
        cross_checks.tasks_are_of_known_kinds,
        cross_checks.the_batch_fits_the_tasks,
        sandbox_checks.the_sandbox_is_installed,
        sandbox_checks.containers_can_be_asked_for,
        sandbox_checks.the_sandboxes_answer,
        machine_checks.the_harness_is_there,
        machine_checks.the_tasks_are_there,
        machine_checks.the_router_is_installed,
        machine_checks.servers_are_not_open_to_the_network,
        machine_checks.servers_have_addresses,
        machine_checks.enough_servers,
        machine_checks.ports_are_free,
        speculation_checks.the_plug_in_is_installed,
    )
)
"""Laws on engines, sandboxes and tasks, which a replay has none of."""


def check(config: Config, *, ranks: int | None = None) -> None:
    """Raise ConfigError at the first law `config` breaks. `ranks`: learner processes; 0 or None: torchrun's count."""
    for law in LAWS:
        if not (config.replay.run and law in OF_SAMPLING):
            law(config)
    started = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    machine_checks.as_many_ranks_as_meant(config, started)
    model_checks.layout_fits(config, started)
    cross_checks.a_batch_of_gradients_meets(config, started)


def check_plan(config: Config, *, ranks: int) -> None:
    """The same for a run of `ranks` learner processes that is only planned: the settings among themselves."""
    for law in LAWS_OF_SETTINGS:
        law(config)
    model_checks.layout_fits(config, ranks)
    cross_checks.a_batch_of_gradients_meets(config, ranks)


def notes(config: Config) -> list[str]:
    """Remarks on settings that work and may not do what was meant; printed with the plan."""
    return list(cross_checks.remarks(config))
