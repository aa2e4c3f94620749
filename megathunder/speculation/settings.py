"""How the plug-in's settings reach a server: one environment variable, since SGLang's own arguments are SGLang's."""

from __future__ import annotations

import os

import msgspec

from megathunder.config.speculation import SpeculationConfig
from megathunder.speculation.drafts import SuffixCache
from megathunder.speculation.patterns import PatternCache

VARIABLE = "MEGATHUNDER_SPECULATION"


def settings_variable(settings: SpeculationConfig) -> dict[str, str]:
    """What to add to the server's environment."""
    return {VARIABLE: msgspec.json.encode(settings).decode()}


def read_settings() -> SpeculationConfig:
    """The settings this server was started with; the defaults where it was started by hand."""
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=SpeculationConfig)


def build_cache(settings: SpeculationConfig) -> SuffixCache:
    """The cache that `settings` names."""
    if settings.cache == "patterns":
        return PatternCache(settings.cache_tokens)
    from megathunder.speculation.arctic import ArcticCache

    return ArcticCache(settings.cache_tokens)
