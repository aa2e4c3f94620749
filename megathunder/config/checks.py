"""Every check across rooms that needs no engine: `check(config)` runs them in order before anything expensive starts.

A law is a function from the configuration to None that raises ConfigError (seen, expected, remedy). Laws read only
configuration files, the process's core set and the file system, and ask a Docker daemon or sandbox servers, where there
should be some, whether they are there: well under a second together. Call `check` once, in the process that starts the
others, before the run folder is made; for a plan `check_plan`, which asks nothing of this machine and needs no weights.
"""

from __future__ import annotations

import os

from megathunder.config import comparison_laws, machine, meaning, models, sandbox_laws, speculation_laws
from megathunder.config.bounds import numbers_are_in_range
from megathunder.config.pass_through import passed_names_exist
from megathunder.config.root import Config

LAWS_OF_SETTINGS = (
    numbers_are_in_range,
    meaning.groups_carry_a_signal,
    meaning.group_sizes_make_a_ladder,
    meaning.gradients_can_be_kept_apart,
    meaning.ratios_have_one_correction,
    meaning.release_fits_the_objective,
    meaning.penalties_have_what_they_need,
    comparison_laws.compared_variants_are_legal,
    comparison_laws.plain_rollouts_are_others,
    meaning.a_replay_has_a_recording,
    meaning.tasks_are_of_known_kinds,
    meaning.the_batch_fits_the_tasks,
    meaning.lengths_fit_each_other,
    meaning.sandboxes_outlive_their_trajectories,
    models.models_are_described_and_agree,
    machine.the_gpu_is_known,
    machine.servers_have_addresses,
    machine.enough_servers,
    machine.changes_are_acknowledged,
    machine.adapters_can_be_published,
    speculation_laws.drafts_fit_the_servers,
)
LAWS_OF_THE_MACHINE = (
    machine.the_run_folder_is_free,
    models.model_folders_are_whole,
    sandbox_laws.the_sandbox_is_installed,
    sandbox_laws.containers_can_be_asked_for,
    machine.the_harness_is_there,
    machine.the_tasks_are_there,
    machine.wandb_is_installed,
    machine.the_router_is_installed,
    speculation_laws.the_plug_in_is_installed,
    machine.cores_exist,
    machine.devices_exist,
    machine.kernels_are_installed,
    passed_names_exist,
    machine.servers_are_not_open_to_the_network,
    machine.ports_are_free,
    machine.the_shared_folder_can_be_written,
    sandbox_laws.the_sandboxes_answer,
)
LAWS = LAWS_OF_SETTINGS + LAWS_OF_THE_MACHINE

OF_SAMPLING = frozenset(
    (
        meaning.tasks_are_of_known_kinds,
        meaning.the_batch_fits_the_tasks,
        sandbox_laws.the_sandbox_is_installed,
        sandbox_laws.containers_can_be_asked_for,
        sandbox_laws.the_sandboxes_answer,
        machine.the_harness_is_there,
        machine.the_tasks_are_there,
        machine.the_router_is_installed,
        machine.servers_are_not_open_to_the_network,
        machine.servers_have_addresses,
        machine.enough_servers,
        machine.ports_are_free,
        speculation_laws.the_plug_in_is_installed,
    )
)
"""Laws on engines, sandboxes and tasks, which a replay has none of."""


def check(config: Config, *, ranks: int | None = None) -> None:
    """Raise ConfigError at the first law `config` breaks. `ranks`: learner processes; 0 or None: torchrun's count."""
    for law in LAWS:
        if not (config.replay.run and law in OF_SAMPLING):
            law(config)
    started = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    machine.as_many_ranks_as_meant(config, started)
    models.layout_fits(config, started)
    meaning.a_batch_of_gradients_meets(config, started)


def check_plan(config: Config, *, ranks: int) -> None:
    """The same for a run of `ranks` learner processes that is only planned: the settings among themselves."""
    for law in LAWS_OF_SETTINGS:
        law(config)
    models.layout_fits(config, ranks)
    meaning.a_batch_of_gradients_meets(config, ranks)


def notes(config: Config) -> list[str]:
    """Remarks on settings that work and may not do what was meant; printed with the plan."""
    return list(meaning.remarks(config))
