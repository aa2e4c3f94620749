"""How a server is told to draft: arguments, plug-ins, and settings that arrive as they were sent."""

from __future__ import annotations

import pytest

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import PLUGIN, SpeculationConfig
from megathunder.rollout.servers.command import server_command, server_environment
from megathunder.speculation.patterns import PatternCache
from megathunder.speculation.settings import VARIABLE, build_cache, read_settings

SETTINGS = SpeculationConfig(max_draft_tokens=4, cache_tokens=1000, gate=False)


def arguments(speculation: SpeculationConfig | None) -> list[str]:
    return server_command(RolloutConfig(), model="m", port=1, device="cpu", version=0, speculation=speculation)


def test_a_server_that_drafts_gets_the_algorithm_the_plug_in_and_its_settings(tmp_path, monkeypatch):
    line = arguments(SETTINGS)
    assert line[line.index("--speculative-algorithm") + 1] == "SUFFIX"
    assert line[line.index("--speculative-num-draft-tokens") + 1] == "5"
    environment = server_environment("cpu", tmp_path, speculation=SETTINGS)
    assert PLUGIN in environment["SGLANG_PLUGINS"].split(",")
    monkeypatch.setenv(VARIABLE, environment[VARIABLE])
    assert read_settings() == SETTINGS and isinstance(build_cache(read_settings()), PatternCache)


def test_a_server_that_does_not_draft_loads_none_of_it(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert "--speculative-algorithm" not in arguments(None)
    environment = server_environment("cpu", tmp_path)
    assert PLUGIN not in environment["SGLANG_PLUGINS"] and VARIABLE not in environment
    assert read_settings() == SpeculationConfig()


@pytest.mark.parametrize("speculation", [None, SETTINGS])
def test_on_a_gpu_the_stand_ins_stay_out(tmp_path, speculation, monkeypatch):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    environment = server_environment("cuda", tmp_path, speculation=speculation)
    assert environment.get("SGLANG_PLUGINS", "") == (PLUGIN if speculation else "")
