"""Types of settings that say more than `int` or `str`: their bounds, and what a relative path is relative to.

    updates: PositiveInt = 40            more than 0
    model: InputPath = "policies/a"      relative to the TOML file where it exists there, else to the current folder
    function: Reference = "rewards.py:score"      the same for the file of "file.py:name"

Bounds are `msgspec.Meta`; `checks.check_ranges` holds every number to them, whether a file or the command line set it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

INPUT_PATH, OUTPUT_PATH, REFERENCE = "input path", "output path", "reference"

PositiveInt = Annotated[int, Meta(gt=0)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
InputPath = Annotated[str, INPUT_PATH]
"""A file or folder that is read."""
OutputPath = Annotated[str, OUTPUT_PATH]
"""A folder that is written; relative to the current folder."""
Reference = Annotated[str, REFERENCE]
"""A registered name, "file.py:name" or "package.module:name" (registry.py)."""
References = Annotated[tuple[str, ...], REFERENCE]
