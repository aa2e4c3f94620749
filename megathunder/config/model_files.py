"""Whether the files of a Hugging Face model folder are whole: read by their headers, in milliseconds, without torch.

    *.safetensors            [8 bytes: n][n bytes: JSON header][data]; the file is as long as its header says
    *.index.json             every file that it names is there
    tokenizer.json, generation_config.json      JSON objects; end tokens are numbers

A Git LFS pointer, which a clone without LFS leaves in place of a file, is named as such. Raises ConfigError.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megathunder.errors import ConfigError

LFS = b"version https://git-lfs"
LARGEST_HEADER_BYTES = 100_000_000  # as the format's own reader
LENGTH_BYTES = 8


def check_model_files(folder: Path, setting: str) -> None:
    """Raise ConfigError at the first file of `folder` that is missing or broken; `setting` named the folder."""
    weights = sorted(folder.glob("*.safetensors"))
    tokenizer = folder / "tokenizer.json"
    missing = [name for name, there in (("tokenizer.json", tokenizer.is_file()), ("weights", weights)) if not there]
    if missing:
        raise ConfigError(
            f"{setting} = {str(folder)!r} has no {' and no '.join(missing)}",
            expected="config.json, tokenizer.json and *.safetensors",
            remedy=f"complete the folder, or set {setting} to a complete one",
        )
    for file in weights:
        check_safetensors(file)
    for index in folder.glob("*.safetensors.index.json"):
        _check_index(index)
    if "model" not in read_json(tokenizer):
        raise _broken(tokenizer, "it has no model", "the tokenizer.json of the tokenizers library")
    if (generation := folder / "generation_config.json").is_file():
        end_tokens(generation)


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`."""
    content = file.read_bytes()
    if content.startswith(LFS):
        raise _pointer(file)
    try:
        parsed = json.loads(content)
    except ValueError as error:  # also UnicodeDecodeError
        raise _broken(file, str(error), "valid JSON") from None
    if not isinstance(parsed, dict):
        raise _broken(file, f"it holds a {type(parsed).__name__}", "a JSON object")
    return parsed


def end_tokens(generation_config: Path) -> tuple[int, ...]:
    """`eos_token_id` of a generation_config.json, one or several; empty where it has none."""
    value = read_json(generation_config).get("eos_token_id")
    tokens = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
        raise _broken(generation_config, f"eos_token_id is {value!r}", "a token id, or a list of them")
    return tuple(tokens)


def check_safetensors(file: Path) -> None:
    """Raise ConfigError unless `file` is as long as its header says."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(LFS))
        if start == LFS:
            raise _pointer(file)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, LARGEST_HEADER_BYTES):
            raise _broken(file, f"{size} bytes and no whole header", "a complete safetensors file")
        opened.seek(LENGTH_BYTES)
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise _broken(file, "its header is not that of safetensors", "a safetensors file") from None
    meant = LENGTH_BYTES + length + max(ends, default=0)
    if size != meant:
        raise _broken(file, f"{size:,} bytes, {meant:,} by its header", "a complete download")


def _check_index(index: Path) -> None:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict):
        raise _broken(index, "it has no weight_map", "tensor names and their files")
    if absent := sorted({name for name in table.values() if not (index.parent / str(name)).is_file()}):
        raise _broken(index, f"{len(absent)} of its files are missing, first {absent[0]}", "every file that it names")


def _broken(file: Path, seen: str, expected: str) -> ConfigError:
    return ConfigError(f"{file}: {seen}", expected=expected, remedy=f"download {file.name} again")


def _pointer(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is a Git LFS pointer, not the file itself",
        expected="the file's content",
        remedy=f"run `git lfs pull` in {file.parent}, or download the folder with `hf download`",
    )
