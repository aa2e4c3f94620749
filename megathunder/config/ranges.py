"""Holds every number of a configuration to the bounds that stand beside its field. Called by `checks.py`, `toml.py`."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated

from msgspec import Meta

from megathunder.config.root import Config
from megathunder.errors import ConfigError


def check_ranges(config: Config) -> None:
    """Raise ConfigError at the first number that is not finite or out of its bounds."""
    for section, key, bounds in _numbers():
        given = getattr(getattr(config, section), key)
        for value in given if isinstance(given, tuple) else (given,):
            if not (math.isfinite(value) and _within(value, bounds)):
                raise range_error(f"{section}.{key}", value)


def range_error(name: str, value: float, origin: str = "") -> ConfigError:
    """The error for `name = value` out of its bounds; `origin` is the file it comes from."""
    bounds = next(found for section, key, found in _numbers() if name == f"{section}.{key}")
    section, _, key = name.partition(".")
    return ConfigError(
        f"{origin + ': ' if origin else ''}{name} = {value}",
        expected=_describe(bounds)
        if math.isfinite(value)
        else ", ".join(filter(None, ("a finite number", _describe(bounds)))),
        remedy=f"set it in that range; the default is {getattr(getattr(Config(), section), key)}",
    )


def annotations(kind: type) -> dict[str, tuple[object, tuple[object, ...]]]:
    """Field name -> (type, what `Annotated` adds to it) of a configuration dataclass."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = {name: (hints[name], getattr(hints[name], "__metadata__", ())) for name in (f.name for f in fields(kind))}
    return {name: (typing.get_args(hint)[0] if extra else hint, extra) for name, (hint, extra) in found.items()}


def _numbers() -> Iterator[tuple[str, str, Meta]]:
    """(section, key, bounds) of every setting that is a number, or several."""
    for section, (kind, _) in annotations(Config).items():
        for key, (hint, extra) in annotations(kind).items() if is_dataclass(kind) else ():  # type: ignore[arg-type]
            if typing.get_origin(hint) is tuple:
                element = typing.get_args(hint)[0]
                hint, *extra = typing.get_args(element) if typing.get_origin(element) is Annotated else (element,)
            if hint in (int, float):
                yield section, key, next((part for part in extra if isinstance(part, Meta)), Meta())


def _within(value: float, bounds: Meta) -> bool:
    return (
        (bounds.gt is None or value > bounds.gt)
        and (bounds.ge is None or value >= bounds.ge)
        and (bounds.lt is None or value < bounds.lt)
        and (bounds.le is None or value <= bounds.le)
    )


def _describe(bounds: Meta) -> str:
    parts = [
        f"more than {bounds.gt:g}" if bounds.gt is not None else "",
        f"{bounds.ge:g} or more" if bounds.ge is not None else "",
        f"below {bounds.lt:g}" if bounds.lt is not None else "",
        f"at most {bounds.le:g}" if bounds.le is not None else "",
    ]
    return ", ".join(part for part in parts if part)
