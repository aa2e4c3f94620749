"""What the name of a compared variant makes of a run's settings."""

from __future__ import annotations

import pytest
from config_cases import change

from megathunder.config import Config
from megathunder.config.variant import Variant, plain
from megathunder.errors import ConfigError

EVERYTHING = change(
    Config(),
    rollout__speculation="suffix",
    run__group_control="sagc",
    salt__amplification=1.0,
    salt__measure=True,
    sagc__trajectories_per_update=48,
)


def test_plain_rollouts_switch_off_what_the_settings_switch_on_and_nothing_else():
    applied = Variant.parse("thundersync+plain_rollouts").apply(EVERYTHING)
    assert applied.drafting is None and applied.placement.policy == "round_robin"
    assert applied.group_sizes == (8,) and applied.prompts_at_most == EVERYTHING.run.groups_per_update
    assert not applied.salt.active
    assert plain(applied) == applied
    on = {"rollout__speculation": "suffix", "placement__policy": "cache_aware", "run__group_control": "sagc"}
    assert change(applied, **on, salt=EVERYTHING.salt) == EVERYTHING
    assert Variant.parse("thundersync").apply(EVERYTHING) == EVERYTHING


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("sync+plain_rollouts", "sync"),
        ("thundersync/turn_forward+plain_rollouts", "thundersync/turn_forward"),
        ("thundersync+plain_rollouts+content_ready", "thundersync+content_ready"),
    ],
)
def test_a_variant_with_plain_rollouts_is_compared_with_the_same_without(name: str, own: str):
    variant = Variant.parse(name)
    assert variant.plain_rollouts and variant.with_own_rollouts == own
    assert not Variant.parse(own).plain_rollouts


def test_an_unknown_addition_is_refused_with_those_there_are():
    with pytest.raises(ConfigError) as refused:
        Variant.parse("thundersync+plain")
    assert "+plain_rollouts" in refused.value.expected
