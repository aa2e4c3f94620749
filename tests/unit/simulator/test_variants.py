"""What the name of a compared variant makes of a run's settings."""

from __future__ import annotations

import pytest

from megathunder.config import Config
from megathunder.errors import ConfigError
from megathunder.simulator.variant import Variant


def test_a_name_changes_the_schedule_and_the_release_and_nothing_else():
    applied = Variant.parse("periodic_async/turn_forward+content_ready").apply(Config())
    assert (applied.schedule, applied.streaming.release) == ("periodic_async", "turn_forward")
    assert applied.streaming.content_ready and not Config().streaming.content_ready
    assert Variant.parse(Config().schedule).apply(applied).rollout == Config().rollout
    assert Variant.parse(Config().schedule).apply(Config()) == Config()


def test_an_unknown_addition_is_refused_with_those_there_are():
    with pytest.raises(ConfigError) as refused:
        Variant.parse("thundersync+plain")
    assert "+content_ready" in refused.value.expected
