"""Imports of optional packages, with the way to install them in the error."""

from __future__ import annotations

import importlib
from types import ModuleType

from megathunder.errors import ConfigError


def optional_package(module: str, extra: str) -> ModuleType:
    """The module, of the extra of this package that brings it. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module} cannot be imported: {error}",
            expected=f"the package of the extra {extra}",
            remedy=f"pip install -e .[{extra}]",
        ) from None
