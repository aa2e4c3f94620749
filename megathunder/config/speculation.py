"""How servers draft where `rollout.speculation` is on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import PositiveFloat, PositiveInt

PLUGIN = "megathunder_suffix_speculation"
"""The entry point of this package that SGLang loads into a server that drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """[speculation] drafts from earlier trajectories, and the gate that decides whether a step has any."""

    max_draft_tokens: PositiveInt = 7
    """Tokens drafted for one request in one step, at most."""
    cache_tokens: PositiveInt = 400_000
    """Tokens of earlier trajectories a server keeps to draft from; the oldest go first (0.1 to 0.3 kB each)."""
    cache: Literal["patterns", "arctic"] = "patterns"
    """`patterns`: in plain Python. `arctic`: suffix trees of arctic-inference, where that is installed."""
    gate: bool = True
    """Draft only as far as measured acceptance and cost say that it pays. Off: always draft (measurements only)."""
    low_load_requests: PositiveFloat = 8.0
    """Requests a server at which, coming from high load, speculation is switched on again."""
    high_load_requests: PositiveFloat = 24.0
    """Requests a server at which, coming from low load, speculation is switched off."""
    load_every_s: PositiveFloat = 0.5
    """How often the load is measured; a switch takes two equal measurements in a row."""
