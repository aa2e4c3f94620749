"""A model folder with a broken file is refused by the file's name, before a server starts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from megathunder.config.model_checks import check_model_folder
from megathunder.config.model_files import check_safetensors, end_tokens
from megathunder.errors import ConfigError
from tests.unit.config.config_cases import model_folder, safetensors

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
TOKENIZER = b'{"model": {"vocab": {"a": 0}}}'
BROKEN: list[tuple[str, bytes, str]] = [
    ("model.safetensors", safetensors(weight=64)[:-1], r"model\.safetensors: [\d,]+ bytes, [\d,]+ by its header"),
    ("model.safetensors", safetensors(weight=64)[:20], r"model\.safetensors: 20 bytes and no whole header"),
    ("model.safetensors", b"", r"model\.safetensors: 0 bytes and no whole header"),
    ("model.safetensors", (4).to_bytes(8, "little") + b"nope", r"model\.safetensors: its header is not that"),
    ("model.safetensors", POINTER, r"model\.safetensors is a Git LFS pointer"),
    ("tokenizer.json", POINTER, r"tokenizer\.json is a Git LFS pointer"),
    ("tokenizer.json", TOKENIZER[:12], r"tokenizer\.json: Unterminated"),
    ("tokenizer.json", b"{}", r"tokenizer\.json: it has no model"),
    ("config.json", b"{", r"config\.json: Expecting"),
    ("config.json", b"\xff\xfe{", r"config\.json"),
    ("generation_config.json", b'{"eos_token_id": [2,', r"generation_config\.json: Expecting"),
    ("generation_config.json", b'{"eos_token_id": "</s>"}', r"generation_config\.json: eos_token_id is '</s>'"),
    ("generation_config.json", b"[1]", r"generation_config\.json: it holds a list"),
    (
        "model.safetensors.index.json",
        b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
        r"index\.json: 1 of its files are missing, first model-2\.safetensors",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BROKEN)])
def test_a_broken_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    check_model_folder(folder, "learner.model")
    (tmp_path / "m" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        check_model_folder(folder, "learner.model")


def test_what_the_library_writes_is_whole(tmp_path: Path) -> None:
    save_file({"a": numpy.zeros((3, 5), numpy.float32), "b": numpy.zeros(7, numpy.int64)}, tmp_path / "x.safetensors")
    check_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("value", "tokens"), [(None, ()), (2, (2,)), ([2, 500], (2, 500))])
def test_end_tokens_are_one_or_several(value: object, tokens: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({} if value is None else {"eos_token_id": value}))
    assert end_tokens(tmp_path / "generation_config.json") == tokens
