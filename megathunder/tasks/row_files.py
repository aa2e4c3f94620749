"""Rows of a JSON, JSONL or Parquet file. Called by tasks.swe, tasks.problems and tools/prepare_data.py."""

from __future__ import annotations

import json
from pathlib import Path

from megathunder.errors import ConfigError


def raw_rows(path: Path) -> list[object]:
    """The objects of a JSON, JSONL or Parquet file; ConfigError that names the line which is none."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), str(error)) from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.split("\n"), 1)  # other ends of lines may stand in a JSON text
        return [_loaded(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    loaded = _loaded(text, str(path))
    return loaded if isinstance(loaded, list) else [loaded]


def _loaded(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise _unreadable(where, f"{error.msg} ({line}column {error.colno})") from None


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
