"""Checks of suffix speculation: its limits, SGLang's settings beside it, the installation. Called by `checks.py`."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

from megathunder.config.root import Config
from megathunder.config.speculation import PLUGIN, SpeculationConfig
from megathunder.errors import ConfigError

ONLY = {
    "tp_size": "1",
    "tensor_parallel_size": "1",
    "tp": "1",
    "pp_size": "1",
    "pipeline_parallel_size": "1",
    "page_size": "1",
    "enable_dp_attention": "false",
    "speculative_algorithm": "SUFFIX",
}
"""SGLang's settings with which drafts work: one rank decides and verifies, its cache has pages of one token."""


def check_speculation(config: Config) -> None:
    if config.drafting is not None:
        _check_limits(config.drafting, config.rollout.max_running_requests)
        _check_sglang_settings(config.rollout.sglang)


def check_speculation_plugin(config: Config) -> None:
    """Where this run starts the servers."""
    if config.drafting is not None and not config.rollout.urls:
        _check_installed(config.drafting)


def _check_limits(settings: SpeculationConfig, places: int) -> None:
    if settings.low_load_requests >= settings.high_load_requests:
        raise ConfigError(
            f"speculation.low_load_requests = {settings.low_load_requests:g}, "
            f"speculation.high_load_requests = {settings.high_load_requests:g}",
            expected="low below high: between them a server stays in the regime it is in",
            remedy=f"set speculation.high_load_requests = {3 * settings.low_load_requests:g}",
        )
    if settings.max_draft_tokens >= places:
        raise ConfigError(
            f"speculation.max_draft_tokens = {settings.max_draft_tokens}, rollout.max_running_requests = {places}",
            expected="fewer draft tokens: they take the places of requests in a decode step",
            remedy=f"set rollout.max_running_requests = {8 * (settings.max_draft_tokens + 1)}",
        )


def _check_sglang_settings(sglang: dict[str, str]) -> None:
    for name, only in ONLY.items():
        if sglang.get(name, only) != only:
            raise ConfigError(
                f"rollout.speculation = 'suffix' with rollout.sglang.{name} = {sglang[name]}",
                expected=f"{name} = {only}",
                remedy=f"set rollout.speculation = 'off', or leave out rollout.sglang.{name}",
            )


def _check_installed(settings: SpeculationConfig) -> None:
    if PLUGIN not in {entry.name for entry in entry_points(group="sglang.srt.plugins")}:
        raise ConfigError(
            f"rollout.speculation = 'suffix', and SGLang would not find the plug-in {PLUGIN}",
            expected="this package installed: the plug-in is one of its entry points",
            remedy="bash tools/setup.sh (or pip install --no-deps -e .)",
        )
    if settings.cache == "arctic" and find_spec("arctic_inference") is None:
        raise ConfigError(
            "speculation.cache = 'arctic', and the package arctic-inference is not installed",
            expected="arctic-inference",
            remedy="pip install --no-deps -r requirements/speculation.txt, or set speculation.cache = 'patterns'",
        )
