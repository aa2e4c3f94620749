"""Checks of the policy, the teacher and the parallel layout; reads configuration files only. Called by `checks.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import read_config_json, read_model_shape
from megathunder.config.root import Config
from megathunder.errors import ConfigError


def check_models(config: Config) -> None:
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
    """Raise ConfigError, naming `setting`, where a description, a tokenizer or weights are missing."""
    read_config_json(folder, setting)
    path = Path(folder)
    wanted = {"tokenizer.json": "tokenizer.json", "weights": "*.safetensors"}
    missing = [name for name, pattern in wanted.items() if not any(path.glob(pattern))]
    if missing:
        raise ConfigError(
            f"{setting} = {folder!r} has no {' and no '.join(missing)}",
            expected="config.json, tokenizer.json and *.safetensors",
            remedy=f"complete the folder, or set {setting} to a whole one",
        )


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


def check_parallel_layout(config: Config, ranks: int) -> None:
    learner, shape = config.learner, read_model_shape(config.learner.model)
    divisions = (
        ("tensor_parallel", learner.tensor_parallel, "attention heads", shape.heads),
        ("tensor_parallel", learner.tensor_parallel, "key-value heads", shape.kv_heads),
        ("expert_parallel", learner.expert_parallel, "experts", shape.experts or 1),
    )
    for name, ways, what, count in divisions:
        if count % ways:
            legal = [n for n in range(1, count + 1) if count % n == 0]
            raise ConfigError(
                f"learner.{name} = {ways}, the policy has {count} {what}",
                expected=f"a divisor of {count}",
                remedy=f"set learner.{name} to one of {', '.join(map(str, legal))}",
            )
    _check_stages(learner, shape.layers)
    cell = learner.tensor_parallel * learner.pipeline_parallel * learner.context_parallel
    if ranks % cell:
        raise ConfigError(
            f"{ranks} learner rank(s), tensor x pipeline x context parallel = {learner.tensor_parallel} x "
            f"{learner.pipeline_parallel} x {learner.context_parallel} = {cell}",
            expected=f"a multiple of {cell} ranks",
            remedy=f"torchrun --nproc-per-node {cell * max(1, round(ranks / cell))} ..., or a smaller layout",
        )
    experts = (learner.expert_tensor_parallel or learner.tensor_parallel) * learner.expert_parallel
    if ranks % (experts * learner.pipeline_parallel):
        raise ConfigError(
            f"{ranks} learner rank(s), expert tensor x expert x pipeline parallel = "
            f"{experts // learner.expert_parallel} x {learner.expert_parallel} x {learner.pipeline_parallel}",
            expected=f"a multiple of {experts * learner.pipeline_parallel} ranks",
            remedy=f"torchrun --nproc-per-node {experts * learner.pipeline_parallel} ..., or a smaller layout",
        )
    _check_shards(learner, ranks, experts)
    if learner.sequence_parallel and learner.tensor_parallel == 1:
        raise ConfigError(
            "learner.sequence_parallel = true with learner.tensor_parallel = 1",
            expected="tensor parallelism to share the sequence over",
            remedy="set learner.tensor_parallel = 2 or more, or sequence_parallel = false",
        )


def _check_shards(learner: LearnerConfig, ranks: int, experts: int) -> None:
    """Accumulators are shared by whole cells: a multiple of the ranks that collectives tie together anyway."""
    shards, tensor = learner.accumulator_shards, learner.tensor_parallel
    copies = ranks // (tensor * learner.pipeline_parallel)
    tied = math.lcm(tensor * learner.context_parallel, experts) // tensor
    legal = [n for n in range(1, copies + 1) if copies % n == 0 and n % tied == 0 or n == 1]
    if shards not in legal:
        raise ConfigError(
            f"learner.accumulator_shards = {shards}, {copies} rank(s) hold the same parameters"
            + (f", {tied} of them tied by context or expert parallelism" if tied > 1 else ""),
            expected=f"one of {', '.join(map(str, legal))}",
            remedy=f"set learner.accumulator_shards = {legal[-1]}, or start more learner ranks",
        )
    if shards > 1 and learner.shared_prompt == "group":
        raise ConfigError(
            f"learner.accumulator_shards = {shards} with learner.shared_prompt = 'group'",
            expected="'packed' or 'off': a held prompt waits for all trajectories of its group, which replicas part",
            remedy="set learner.shared_prompt = 'packed'",
        )


def _check_stages(learner: LearnerConfig, layers: int) -> None:
    """Stages may differ by their layers; the chunks of a virtual pipeline may not."""
    if layers < learner.pipeline_parallel:
        raise ConfigError(
            f"learner.pipeline_parallel = {learner.pipeline_parallel}, the policy has {layers} layers",
            expected="at least one layer a stage",
            remedy=f"set learner.pipeline_parallel to {layers} or less",
        )
    chunks = learner.pipeline_parallel * learner.virtual_pipeline
    if learner.virtual_pipeline > 1 and layers % chunks:
        raise ConfigError(
            f"learner.virtual_pipeline = {learner.virtual_pipeline} with pipeline_parallel = "
            f"{learner.pipeline_parallel}, the policy has {layers} layers",
            expected=f"a multiple of {chunks} layers: the chunks of a virtual pipeline are equal",
            remedy="set learner.virtual_pipeline = 1; stages alone may be uneven",
        )
