"""Laws on what a comparison alternates. Called by `checks.py`."""

from __future__ import annotations

from megathunder.config.cross_checks import groups_carry_a_signal, release_fits_the_objective, the_batch_fits_the_tasks
from megathunder.config.root import Config
from megathunder.config.variant import Variant, plain
from megathunder.errors import ConfigError


def compared_variants_are_legal(config: Config) -> None:
    for name in config.run.alternate:
        release_fits_the_objective(Variant.parse(name).apply(config))


def plain_rollouts_are_others(config: Config) -> None:
    """+plain_rollouts switches something off, between updates, in a run that samples."""
    variants = [Variant.parse(name) for name in config.run.alternate]
    for variant in variants:
        if variant.plain_rollouts:
            _there_are_rollouts(config, variant)
            _something_is_on(config, variant)
            _nobody_samples_ahead(variants, variant)
            _its_accumulators_are_its_own(config, variant)
            groups_carry_a_signal(variant.apply(config))
            the_batch_fits_the_tasks(variant.apply(config))


def _there_are_rollouts(config: Config, variant: Variant) -> None:
    if config.replay.run:
        raise ConfigError(
            f"{variant.name!r} in a replay",
            expected="a live comparison: a replay takes its trajectories and groups from a recording",
            remedy=f"compare live (--config FILE), or write {variant.with_own_rollouts!r}",
        )


def _something_is_on(config: Config, variant: Variant) -> None:
    if plain(config) == config:
        raise ConfigError(
            f"{variant.name!r} with rollout.speculation = 'off', placement.policy = 'round_robin', "
            "run.group_control = 'fixed', salt.amplification = 0, salt.measure = false",
            expected="at least one of them on: nothing is there to switch off",
            remedy=f"set rollout.speculation = 'suffix', or write {variant.with_own_rollouts!r}",
        )


def _nobody_samples_ahead(variants: list[Variant], variant: Variant) -> None:
    ahead = next((other.name for other in variants if other.schedule == "one_step_off"), None)
    if ahead is not None:
        raise ConfigError(
            f"{variant.name!r} compared with {ahead!r}",
            expected="schedules that sample one update at a time: servers and placement are switched between updates",
            remedy=f"leave out {ahead!r} or {variant.name!r}",
        )


def _its_accumulators_are_its_own(config: Config, variant: Variant) -> None:
    """The learner knows a trajectory that SALT reweighs by its accumulator; other uses of one would be reweighed."""
    streaming = variant.apply(config).streaming
    if config.salt.active and (streaming.content_ready or streaming.release != "trajectory"):
        raise ConfigError(
            f"{variant.name!r} with salt.amplification = {config.salt.amplification}, content_ready = "
            f"{str(streaming.content_ready).lower()}, release = {streaming.release!r}",
            expected="whole trajectories with known rewards: the learner would reweigh those that are kept apart",
            remedy="set salt.amplification = 0 and measure = false, or leave out content_ready and the release",
        )
