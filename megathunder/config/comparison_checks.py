"""Checks of what a comparison alternates. Called by `checks.py`."""

from __future__ import annotations

from megathunder.config.cross_checks import check_release_point
from megathunder.config.root import Config
from megathunder.config.variant import Variant


def check_variants(config: Config) -> None:
    for name in config.run.alternate:
        check_release_point(Variant.parse(name).apply(config))
