"""Which parallel layouts are legal: on so many ranks, and for a model of such a shape.

    ranks = data x pipeline x context x tensor = expert data x pipeline x expert x expert tensor
    heads, key-value heads / tensor;  key-value heads / (tensor x context);  MLP width / tensor;  experts / expert
    mixture of experts and tensor > 1: sequence parallelism;  virtual pipeline: equal chunks, pipeline > 1

The one place that says so: the checks before a run and `--plan` call `check_layout`, learner processes call
`check_ranks` before they build a group and `check_model_split` before they build a model. Raises ConfigError.
"""

from __future__ import annotations

import math

from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import ModelShape, read_model_shape
from megathunder.config.root import Config
from megathunder.errors import ConfigError


def check_layout(config: Config, ranks: int) -> None:
    """Both, for a run of `ranks` learner processes."""
    _check_itself(config.learner)
    check_model_split(config.learner, read_model_shape(config.learner.model))
    check_ranks(config.learner, ranks)


def check_ranks(learner: LearnerConfig, ranks: int) -> None:
    """The layout fills `ranks` processes, whatever the model."""
    _check_itself(learner)
    tensor, pipeline, context = learner.tensor_parallel, learner.pipeline_parallel, learner.context_parallel
    replica = tensor * pipeline * context
    if ranks % replica:
        raise ConfigError(
            f"{ranks} learner rank(s), tensor x pipeline x context parallel = {tensor} x {pipeline} x {context} = "
            f"{replica}",
            expected=f"a multiple of {replica} ranks",
            remedy=f"torchrun --nproc-per-node {replica * max(1, round(ranks / replica))} ..., or a smaller layout",
        )
    experts = learner.expert_tensor * learner.expert_parallel
    if ranks % (experts * pipeline):
        raise ConfigError(
            f"{ranks} learner rank(s), expert tensor x expert x pipeline parallel = {learner.expert_tensor} x "
            f"{learner.expert_parallel} x {pipeline} = {experts * pipeline}",
            expected=f"a multiple of {experts * pipeline} ranks",
            remedy=f"torchrun --nproc-per-node {experts * pipeline} ..., or a smaller layout",
        )
    _check_shards(learner, ranks, experts)


def check_model_split(learner: LearnerConfig, shape: ModelShape) -> None:
    """A model of this shape can be split so."""
    tensor, context = learner.tensor_parallel, learner.context_parallel
    for name, ways, what, count in (
        ("tensor_parallel", tensor, "attention heads", shape.heads),
        ("tensor_parallel", tensor, "key-value heads", shape.kv_heads),
        ("tensor_parallel", tensor, "columns in a dense MLP", shape.ffn),
        ("expert_parallel", learner.expert_parallel, "experts", shape.experts or 1),
        ("expert_tensor_parallel", learner.expert_tensor, "columns in an expert", shape.expert_ffn),
    ):
        if count % ways:
            legal = [n for n in range(1, min(count, 64) + 1) if count % n == 0]
            raise ConfigError(
                f"learner.{name} = {ways}, the policy has {count} {what}",
                expected=f"a divisor of {count}",
                remedy=f"set learner.{name} to one of {', '.join(map(str, legal))}",
            )
    if shape.kv_heads // tensor % context:
        raise ConfigError(
            f"learner.context_parallel = {context}, the policy has {shape.kv_heads} key-value heads, "
            f"{shape.kv_heads // tensor} on a tensor-parallel rank",
            expected=f"a divisor of {shape.kv_heads // tensor}: context ranks exchange tokens for heads",
            remedy="lower learner.context_parallel or learner.tensor_parallel",
        )
    _check_stages(learner, shape.layers)
    if shape.experts:
        _check_experts(learner)


def _check_experts(learner: LearnerConfig) -> None:
    if learner.tensor_parallel > 1 and not learner.sequence_parallel:
        raise ConfigError(
            f"a mixture of experts with learner.tensor_parallel = {learner.tensor_parallel}, sequence_parallel = false",
            expected="sequence_parallel = true: Megatron-Core trains experts under tensor parallelism only so",
            remedy="set learner.sequence_parallel = true",
        )
    on_experts = learner.lora_rank and {"gate_proj", "up_proj", "down_proj"} & set(learner.lora_targets)
    if on_experts and learner.expert_tensor not in (1, learner.tensor_parallel):
        raise ConfigError(
            f"learner.lora_rank = {learner.lora_rank} on experts with expert_tensor_parallel = {learner.expert_tensor}",
            expected=f"1 or learner.tensor_parallel ({learner.tensor_parallel})",
            remedy="set learner.expert_tensor_parallel to one of these",
        )
    if learner.lora_rank and learner.grouped_experts:
        raise ConfigError(
            f"learner.lora_rank = {learner.lora_rank} with learner.megatron.moe_grouped_gemm = true",
            expected="experts one by one: an adapter sits on a layer of its own",
            remedy="remove moe_grouped_gemm from [learner.megatron]",
        )


def _check_shards(learner: LearnerConfig, ranks: int, experts: int) -> None:
    """Accumulators are shared by whole cells: a multiple of the ranks that collectives couple anyway."""
    shards, tensor = learner.accumulator_shards, learner.tensor_parallel
    copies = ranks // (tensor * learner.pipeline_parallel)
    coupled = math.lcm(tensor * learner.context_parallel, experts) // tensor
    legal = [n for n in range(1, copies + 1) if copies % n == 0 and n % coupled == 0 or n == 1]
    if shards not in legal:
        raise ConfigError(
            f"learner.accumulator_shards = {shards}, {copies} rank(s) hold the same parameters"
            + (f", {coupled} of them coupled by context or expert parallelism" if coupled > 1 else ""),
            expected=f"one of {', '.join(map(str, legal))}",
            remedy=f"set learner.accumulator_shards = {legal[-1]}, or start more learner ranks",
        )


def _check_stages(learner: LearnerConfig, layers: int) -> None:
    """Stages may differ by their layers; the chunks of a virtual pipeline may not."""
    if layers < learner.pipeline_parallel:
        raise ConfigError(
            f"learner.pipeline_parallel = {learner.pipeline_parallel}, the policy has {layers} layers",
            expected="at least one layer per stage",
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


def _check_itself(learner: LearnerConfig) -> None:
    """What holds on any number of ranks, for any model."""
    if learner.sequence_parallel and learner.tensor_parallel == 1:
        raise ConfigError(
            "learner.sequence_parallel = true with learner.tensor_parallel = 1",
            expected="tensor parallelism to share the sequence over",
            remedy="set learner.tensor_parallel = 2 or more, or sequence_parallel = false",
        )
    if learner.virtual_pipeline == 1:
        return
    if learner.pipeline_parallel == 1:
        raise ConfigError(
            f"learner.virtual_pipeline = {learner.virtual_pipeline} with learner.pipeline_parallel = 1",
            expected="pipeline_parallel of 2 or more",
            remedy="set learner.virtual_pipeline = 1, or raise learner.pipeline_parallel",
        )
    overlap = learner.megatron.get("overlap_p2p_comm", "true").lower()
    batch = learner.megatron.get("batch_p2p_comm", "false").lower()
    if overlap != "true" or batch != "false":
        raise ConfigError(
            f"learner.virtual_pipeline = {learner.virtual_pipeline} with overlap_p2p_comm = {overlap}, "
            f"batch_p2p_comm = {batch}",
            expected="overlap_p2p_comm = true and batch_p2p_comm = false: otherwise stages exchange the wrong "
            "activations and no error is raised",
            remedy="remove both from [learner.megatron]",
        )
