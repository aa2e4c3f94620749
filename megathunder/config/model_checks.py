"""Checks of the policy and the teacher: architecture, lengths, files, vocabulary. Called by `checks.py`."""

from __future__ import annotations

import json
from pathlib import Path

from megathunder.config.model_families import check_family
from megathunder.config.model_files import check_model_files
from megathunder.config.model_shape import read_config_json, read_model_shape
from megathunder.config.root import Config
from megathunder.errors import ConfigError


def check_models(config: Config) -> None:
    check_family(read_config_json(config.learner.model, "learner.model"), config.learner)
    shape = read_model_shape(config.learner.model)
    if 0 < shape.max_positions < config.rollout.max_tokens:
        raise ConfigError(
            f"rollout.max_tokens = {config.rollout.max_tokens}, the policy's max_position_embeddings = "
            f"{shape.max_positions}",
            expected="trajectories no longer than the policy's positions",
            remedy=f"set rollout.max_tokens = {shape.max_positions}",
        )


def check_teacher(config: Config) -> None:
    if config.objective == "opd" and not config.opd.teacher and not config.opd.teacher_urls:
        raise ConfigError(
            "objective = 'opd' with opd.teacher = '' and no opd.teacher_urls",
            expected="a teacher to be scored by",
            remedy="set opd.teacher = 'examples/policies/teacher', or --objective grpo",
        )


def check_model_folders(config: Config) -> None:
    check_model_folder(config.learner.model, "learner.model")


def check_teacher_folder(config: Config) -> None:
    if config.objective == "opd" and config.opd.teacher:
        check_model_folder(config.opd.teacher, "opd.teacher")
        _check_same_vocabulary(config.learner.model, config.opd.teacher)


def check_model_folder(folder: str, setting: str) -> None:
    """Raise ConfigError, naming `setting` or the file, where a description, a tokenizer or weights are missing or
    broken."""
    read_config_json(folder, setting)
    check_model_files(Path(folder), setting)


def _check_same_vocabulary(student: str, teacher: str) -> None:
    files = [(Path(folder) / "tokenizer.json").read_bytes() for folder in (student, teacher)]
    if files[0] == files[1]:
        return
    tokens = [_tokens(json.loads(file)) for file in files]
    different = sorted(t for t in tokens[0].keys() | tokens[1].keys() if tokens[0].get(t) != tokens[1].get(t))
    if different:
        raise ConfigError(
            f"opd.teacher's vocabulary ({len(tokens[1])} tokens) differs from learner.model's ({len(tokens[0])}) in "
            f"{len(different)} tokens, first {different[0]!r}",
            expected="one vocabulary: the teacher scores the student's token ids as they are",
            remedy="choose a teacher of the student's family",
        )


def _tokens(tokenizer: dict) -> dict[str, int]:
    """Token text -> id of a tokenizer.json (a table for BPE and WordPiece, a list of pairs for Unigram)."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {pair[0]: number for number, pair in enumerate(vocabulary)}
    return {**vocabulary, **{t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])}}
