"""Models by Hub id: fetched once, from the cache without a network, and said how to fetch where neither works."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from megathunder.config import Config
from megathunder.config.hub import is_hub_id, resolve_models
from megathunder.config.load import load_config
from megathunder.errors import ConfigError


def of(model: str) -> Config:
    return dataclasses.replace(Config(), learner=dataclasses.replace(Config().learner, model=model))


def cached(cache: Path, name: str) -> Path:
    """A snapshot as the Hub's client lays it down."""
    commit = "a" * 40
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_ids_and_paths_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    assert is_hub_id("Qwen/Qwen3-0.6B")
    for path in ("/a/b", "./a/b", "a", "a/b/c", "data/train.jsonl", "examples/misspelt", "~/model"):
        assert not is_hub_id(path), path


def test_a_cached_model_is_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot = cached(tmp_path / "cache", "someone/small")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "c.toml").write_text('learner.model = "someone/small"\n')
    config = load_config(["--config", "c.toml"])
    assert config.learner.model == "someone/small"
    assert resolve_models(config).learner.model == str(snapshot)


@pytest.mark.parametrize("cause", [LocalEntryNotFoundError, RepositoryNotFoundError, GatedRepoError])
def test_a_model_that_cannot_be_had_is_refused_with_the_way_to_it(
    cause: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise cause.__new__(cause)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match="learner.model = 'someone/nothing'") as refused:
        resolve_models(of("someone/nothing"))
    assert any(way in refused.value.remedy for way in ("hf download someone/nothing", "hf auth login"))


def test_without_network_and_cache_the_refusal_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="hf download someone/nothing"):
        resolve_models(of("someone/nothing"))
    assert time.monotonic() - started < 2


def test_a_description_is_enough_for_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, allow_patterns, **_: wanted.append(allow_patterns) or "/m"
    )
    assert resolve_models(of("someone/large"), weights=False).learner.model == "/m"
    resolve_models(of("someone/large"))
    assert ["*.safetensors" in patterns for patterns in wanted] == [False, True]
