"""Rows of a JSON, JSONL or Parquet file. Called by tasks.swe, tasks.problems and tools/prepare_data.py."""

from __future__ import annotations

import json
from pathlib import Path

from megathunder.errors import ConfigError


def raw_rows(path: Path) -> list[object]:
    """The objects of a JSON, JSONL or Parquet file."""
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # large, and needed for this format only
        except ImportError:
            raise ConfigError(
                f"{path} is a Parquet file, and pyarrow is not installed",
                expected="pyarrow",
                remedy="pip install -e .[parquet], or convert the file to JSONL",
            ) from None
        return pyarrow.parquet.read_table(path).to_pylist()
    try:
        text = path.read_text()
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        loaded = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: {error}",
            expected="a readable JSON, JSONL or Parquet file",
            remedy="mend the file, or name another",
        ) from None
    return loaded if isinstance(loaded, list) else [loaded]
