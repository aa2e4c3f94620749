"""Refusals of options that no measurement could be made with, before a server starts.

Called by the measurements of benchmarks/bench_rollout.py.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megathunder.config.model_checks import check_model_folder
from megathunder.errors import UserError


def at_least(arguments: argparse.Namespace, **least: int) -> None:
    """Raise UserError where an option, or one of its values, is below what `least` says of it."""
    for name, floor in least.items():
        value = getattr(arguments, name)
        for one in value if isinstance(value, list) else (value,):
            if one < floor:
                option = f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{option} {one}", expected=f"{floor} or more", remedy=f"correct {option}; --help shows what it is"
                )


def lasting(seconds: float) -> None:
    """Raise UserError for a duration that is none."""
    if not 0 < seconds < math.inf:
        raise UserError(
            f"--seconds {seconds:g}", expected="a finite number, more than 0", remedy="correct --seconds; 1.2 is usual"
        )


def policy_folder(model: Path) -> None:
    """Raise ConfigError where there is no whole policy to serve."""
    check_model_folder(str(model), "--model")
