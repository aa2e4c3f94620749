"""Checks of what a comparison alternates. Called by `checks.py`."""

from __future__ import annotations

from megathunder.config.cross_checks import check_batch_size, check_group_size, check_release_point
from megathunder.config.root import Config
from megathunder.config.variant import Variant, plain
from megathunder.errors import ConfigError


def check_variants(config: Config) -> None:
    for name in config.run.alternate:
        check_release_point(Variant.parse(name).apply(config))


def check_plain_rollouts(config: Config) -> None:
    """+plain_rollouts switches something off, between updates, in a run that samples."""
    variants = [Variant.parse(name) for name in config.run.alternate]
    for variant in variants:
        if variant.plain_rollouts:
            _check_no_replay(config, variant)
            _check_something_is_on(config, variant)
            _check_no_samples_ahead(variants, variant)
            _check_salt_accumulators(config, variant)
            check_group_size(variant.apply(config))
            check_batch_size(variant.apply(config))


def _check_no_replay(config: Config, variant: Variant) -> None:
    if config.replay.run:
        raise ConfigError(
            f"{variant.name!r} in a replay",
            expected="a live comparison: a replay takes its trajectories and groups from a recording",
            remedy=f"compare live (--config FILE), or write {variant.with_own_rollouts!r}",
        )


def _check_something_is_on(config: Config, variant: Variant) -> None:
    if plain(config) == config:
        raise ConfigError(
            f"{variant.name!r} with rollout.speculation = 'off', placement.policy = 'round_robin', "
            "run.group_control = 'fixed', salt.amplification = 0, salt.measure = false",
            expected="at least one of them on: nothing is there to switch off",
            remedy=f"set rollout.speculation = 'suffix', or write {variant.with_own_rollouts!r}",
        )


def _check_no_samples_ahead(variants: list[Variant], variant: Variant) -> None:
    ahead = next((other.name for other in variants if other.schedule == "one_step_off"), None)
    if ahead is not None:
        raise ConfigError(
            f"{variant.name!r} compared with {ahead!r}",
            expected="schedules that sample one update at a time: servers and placement are switched between updates",
            remedy=f"leave out {ahead!r} or {variant.name!r}",
        )


def _check_salt_accumulators(config: Config, variant: Variant) -> None:
    """The learner knows a trajectory that SALT reweighs by its accumulator; other uses of one would be reweighed."""
    streaming = variant.apply(config).streaming
    if config.salt.active and (streaming.content_ready or streaming.release != "trajectory"):
        raise ConfigError(
            f"{variant.name!r} with salt.amplification = {config.salt.amplification}, content_ready = "
            f"{str(streaming.content_ready).lower()}, release = {streaming.release!r}",
            expected="whole trajectories with known rewards: the learner would reweigh those that are kept apart",
            remedy="set salt.amplification = 0 and measure = false, or leave out content_ready and the release",
        )
