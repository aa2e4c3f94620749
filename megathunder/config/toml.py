"""TOML -> Config and back. Called by `load.py` and by whoever reopens a run folder.

A key that no dataclass has is refused with the nearest one that exists; a value of the wrong type is refused with the
type expected. The free tables (`[learner.megatron]`, `[rollout.sglang]`) take any key and keep scalars as strings.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec
import tomli_w

from megathunder.config.field_types import REFERENCE
from megathunder.config.ranges import annotations, range_error
from megathunder.config.root import Config
from megathunder.config.streamable import reject_non_streamable
from megathunder.config.synonyms import nearest
from megathunder.errors import ConfigError

Table = dict[str, object]


def read_config(path: Path) -> Config:
    """The configuration in `path`, defaults filled in. Raises ConfigError naming the file, the section and the key."""
    if not path.is_file():
        raise ConfigError(
            f"--config {path}: no such file in {Path.cwd()}",
            expected="a TOML file",
            remedy="give one of examples/*.toml, or a run's own runs/<name>/config.toml",
        )
    try:
        table = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}", expected="valid TOML", remedy="correct the line named above") from None
    return from_table(table, str(path))


def from_table(table: Table, origin: str) -> Config:
    """`table` as a Config; `origin` names it in errors."""
    for dotted, legal in _unknown_keys(table, Config):
        raise _unknown_key(dotted, legal, origin)
    for section, key in free_tables():
        free = _subtable(_subtable(table, section), key)
        free.update({k: _as_text(v) for k, v in free.items()})
    for section, key in _reference_lists():  # one name stands for a list of one
        named = _subtable(table, section)
        if isinstance(named.get(key), str):
            named[key] = [named[key]]
    try:
        return msgspec.convert(table, Config)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, table, origin) from None


def to_toml(config: Config) -> str:
    """Every setting of a run, resolved; `from_table(tomllib.loads(to_toml(c)), ...) == c`."""
    return tomli_w.dumps(dataclasses.asdict(config))


def fields_of(kind: type) -> dict[str, object]:
    """Field name -> resolved type of a configuration dataclass."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def settings() -> dict[str, object]:
    """Dotted name -> type of every setting: {"objective": ..., "run.name": str, ...}."""
    found: dict[str, object] = {}
    for name, kind in fields_of(Config).items():
        inner = fields_of(kind) if dataclasses.is_dataclass(kind) else {}
        found.update({f"{name}.{key}": hint for key, hint in inner.items()} or {name: kind})
    return found


def free_tables() -> list[tuple[str, str]]:
    """(section, key) of the settings that take any name."""
    return [(*name.split("."),) for name, hint in settings().items() if typing.get_origin(hint) is dict]  # type: ignore


def _reference_lists() -> list[tuple[str, str]]:
    """(section, key) of the settings that list registered names."""
    return [
        (section, key)
        for section, (kind, _) in annotations(Config).items()
        for key, (hint, extra) in (annotations(kind) if dataclasses.is_dataclass(kind) else {}).items()
        if REFERENCE in extra and typing.get_origin(hint) is tuple
    ]


def _subtable(table: object, key: str) -> Table:
    inner = table.get(key) if isinstance(table, dict) else None
    return inner if isinstance(inner, dict) else {}


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown_keys(table: Table, kind: type, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    known = fields_of(kind)
    for key, value in table.items():
        if key not in known:
            yield prefix + key, sorted(known)
        elif dataclasses.is_dataclass(known[key]) and isinstance(value, dict):
            yield from _unknown_keys(value, typing.cast(type, known[key]), f"{prefix}{key}.")


def _unknown_key(dotted: str, legal: list[str], origin: str) -> ConfigError:
    reject_non_streamable(dotted)
    section, _, key = dotted.rpartition(".")
    where = f"[{section}]" if section else "the top level"
    near, found = difflib.get_close_matches(key, legal, 1, 0.75), nearest(dotted, settings())
    above, _, name = found.rpartition(".")
    if near and (not section or not found):
        hint = f"did you mean {near[0]!r}?"
    elif found:
        hint = f"did you mean [{above}] {name}?" if above != section else f"did you mean {name!r}?"
    else:
        hint = "delete it"
    return ConfigError(f"{origin}: {where} has no setting {key!r}", expected=f"one of {', '.join(legal)}", remedy=hint)


def _wrong_type(error: msgspec.ValidationError, table: Table, origin: str) -> ConfigError:
    """msgspec's message ends in "- at `$.learner.dtype`"; say the value that stands there and what may."""
    _text, _, path = str(error).partition(" - at ")
    dotted = re.sub(r"\[.*?\]", "", path.strip("`").removeprefix("$")).strip(".")
    value: object = table
    for key in dotted.split("."):
        value = value.get(key, value) if isinstance(value, dict) else value
    hint = settings().get(dotted)
    if hint in (int, float) and type(value) in (int, hint):
        return range_error(dotted, typing.cast(float, value), origin)
    reject_non_streamable(str(value))
    if typing.get_origin(hint) is typing.Literal:
        legal = [str(choice) for choice in typing.get_args(hint)]
        near = difflib.get_close_matches(str(value), legal, 1, 0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"set it to {legal[0]!r}"
        return ConfigError(f"{origin}: {dotted} = {value!r}", expected=f"one of {', '.join(legal)}", remedy=remedy)
    kind = getattr(hint, "__name__", str(hint)) if typing.get_origin(hint) is None else str(hint)
    if hint is None:
        kind = "a section, written [name]"
    return ConfigError(
        f"{origin}: {dotted} = {value!r} ({type(value).__name__})",
        expected=kind,
        remedy=f"write it as {_example(hint, value)}" if hint else "put its settings below a [section] line",
    )


def _example(hint: object, value: object) -> str:
    """How `value`, or any value of this type, is written in TOML."""
    if hint in (int, float):
        try:
            number = float(str(value))
            return repr(int(number)) if hint is int and number.is_integer() else repr(number)
        except ValueError:
            pass
    written = {int: "8", float: "0.5", bool: "true or false", str: '"text"'}
    if typing.get_origin(hint) is tuple:
        return f"[{written[typing.get_args(hint)[0]]}]"
    return written.get(typing.cast(type, hint), "a table of strings")
