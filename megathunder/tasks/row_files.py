"""Rows of a JSON, JSONL or Parquet file. Called by the task sources and tools/prepare_data.py."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megathunder.errors import ConfigError


def raw_rows(path: Path) -> list[object]:
    """The objects of a JSON, JSONL or Parquet file. Raises ConfigError that names the line which cannot be read, and
    the row with text that is no Unicode (a lone surrogate, which no tokenizer and no file takes)."""
    if path.suffix == ".parquet":
        return _unicode(_parquet_rows(path), path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), str(error)) from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)  # other ends of lines may stand in a JSON text
        return _unicode([_loaded(line, f"{path}, line {number}") for number, line in lines if line.strip()], path)
    loaded = _loaded(text, str(path))
    return _unicode(loaded if isinstance(loaded, list) else [loaded], path)


def unicode_error(value: object, where: str) -> ConfigError | None:
    """The error for a text of `value` (at `where`) that has no UTF-8 form; None where all have one."""
    try:
        msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError as error:
        return ConfigError(
            f"{where}: {error.object[max(0, error.start - 20) : error.end + 20]!r} is no Unicode text ({error.reason})",
            expected="text without lone surrogates (\\ud800 to \\udfff)",
            remedy="write the characters themselves, or leave the row out",
        )
    return None


def _unicode(rows: Iterable[object], path: Path) -> list[object]:
    checked = list(rows)
    for number, row in enumerate(checked):
        if error := unicode_error(row, f"{path}, row {number}"):
            raise error
    return checked


def _loaded(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise _unreadable(where, f"{error.msg} ({line}column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or lists in lists in lists
        raise _unreadable(where, str(error)) from None


def _parquet_rows(path: Path) -> list[object]:
    try:
        import pyarrow.parquet  # large, and needed for this format only
    except ImportError:
        raise ConfigError(
            f"{path} is a Parquet file, and pyarrow is not installed",
            expected="pyarrow",
            remedy="pip install -e .[parquet], or convert the file to JSONL",
        ) from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise _unreadable(str(path), str(error)) from None


def _unreadable(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where}: {why.splitlines()[0]}",
        expected="a readable JSON, JSONL or Parquet file",
        remedy="mend the file, or name another",
    )
