"""Builds the policy: a Hugging Face folder becomes this rank's part of a Megatron-Core GPTModel, weights included.

    config.json -> Family -> TransformerConfig -> layer spec (`layers.py`) -> GPTModel(s) -> import

A rank holds one GPTModel per virtual pipeline stage (one without). The model is called on packed rows: tokens [1, T],
positions [1, T], an AttentionContext as `packed_seq_params`; the last stage returns logits [1, T, V / tensor].
Called by the learner, the converter and the parity tool. Refuses models that the layout cannot split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megathunder.config.kernels import choose_layers
from megathunder.config.layout_checks import check_model_split
from megathunder.config.learner import LearnerConfig
from megathunder.config.model_families import family_of
from megathunder.config.model_shape import read_config_json, read_model_shape
from megathunder.learner.model.adapter_files import load_adapter
from megathunder.learner.model.attention import PackedRotary
from megathunder.learner.model.bundle import DTYPES, ModelBundle
from megathunder.learner.model.context_parallel import install_context_parallel
from megathunder.learner.model.families.rotary import inverse_frequencies
from megathunder.learner.model.families.rules import Family
from megathunder.learner.model.layers import check_layers, layer_specs
from megathunder.learner.model.lora import attach_lora
from megathunder.learner.model.pipeline_split import uneven_stages
from megathunder.learner.model.weights import import_weights
from megathunder.learner.options import megatron_options
from megathunder.learner.parallel import Layout


def build_model(
    config: LearnerConfig, layout: Layout, *, folder: str | Path | None = None, load: bool = True
) -> ModelBundle:
    """Build this rank's stages from `folder` (default `config.model`) and, with `load`, read their weights.

    Raises ConfigError for an unknown architecture, a folder without weights or a model the layout cannot split.
    """
    folder = Path(folder or config.model)
    hf = read_config_json(folder, "learner.model")
    family = family_of(hf)
    layers = choose_layers(config, cuda=layout.device.type == "cuda")
    check_layers(layers)
    check_model_split(config, read_model_shape(folder))
    transformer_config = transformer_config_of(hf, family, config)
    vocab = hf["vocab_size"]
    padded = -(-vocab // layout.tensor) * layout.tensor
    frequencies = inverse_frequencies(hf)
    chunks = [None] if layout.virtual_pipeline == 1 else range(layout.virtual_pipeline)
    specs = [layer_specs(transformer_config, chunk, layers, adapted=bool(config.lora_rank)) for chunk in chunks]
    stages = [
        _build_stage(transformer_config, hf, layout, padded, frequencies, chunk, spec)
        for chunk, spec in enumerate(specs)
    ]
    bundle = ModelBundle(
        stages=stages,
        transformer_config=transformer_config,
        family=family,
        hf=hf,
        folder=folder,
        layout=layout,
        vocab_size=vocab,
        padded_vocab_size=padded,
    )
    _hide_padding(bundle)
    if load:
        import_weights(bundle, folder)
    if config.lora_rank:
        attach_lora(bundle, config)
        if config.lora_adapter:
            load_adapter(bundle, config, Path(config.lora_adapter))
    return bundle


def transformer_config_of(hf: dict[str, Any], family: Family, config: LearnerConfig) -> TransformerConfig:
    """TransformerConfig of a model under `config`; `[learner.megatron]` has the last word."""
    dtype = DTYPES[config.dtype]
    fields: dict[str, Any] = {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": True,
        "moe_token_dispatcher_type": "alltoall",  # the one that takes micro-batches of any length
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "context_parallel_size": config.context_parallel,
        "sequence_parallel": config.sequence_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "expert_tensor_parallel_size": config.expert_tensor_parallel or config.tensor_parallel,
        "variable_seq_lengths": config.pipeline_parallel > 1,  # packed micro-batches differ in length
    }
    if config.virtual_pipeline > 1:
        fields |= {
            "virtual_pipeline_model_parallel_size": config.virtual_pipeline,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    settings = family.settings(hf)
    if settings["num_layers"] % config.pipeline_parallel and config.virtual_pipeline == 1:
        first, last = uneven_stages(settings["num_layers"], config.pipeline_parallel)
        fields |= {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    if settings.get("num_moe_experts"):
        fields |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp64" if dtype is torch.float64 else "fp32",
        }
    if config.recompute == "full":
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.recompute == "selective":
        fields |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    given = megatron_options(config.megatron).transformer
    if given.get("fp8"):
        # Quantised weights must not outlive a forward pass: steps, loads and frozen copies change what they came from.
        fields["disable_parameter_transpose_cache"] = True
    return TransformerConfig(**(fields | settings | given))


def _build_stage(
    config: TransformerConfig,
    hf: dict[str, Any],
    layout: Layout,
    padded_vocab: int,
    frequencies: torch.Tensor,
    chunk: int,
    spec: TransformerBlockSubmodules,
) -> GPTModel:
    virtual = layout.virtual_pipeline > 1
    where = {"ignore_virtual": not virtual, "vp_stage": chunk if virtual else None}
    stage = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab,
        max_sequence_length=hf.get("max_position_embeddings", 4096),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings", False)),
        position_embedding_type="rope",
        vp_stage=where["vp_stage"],
    )
    stage.rotary_pos_emb.inv_freq = frequencies
    stage.rotary_pos_emb = PackedRotary(stage.rotary_pos_emb)
    if layout.context > 1:
        install_context_parallel(stage, config)
    return stage.to(layout.device)


def _hide_padding(bundle: ModelBundle) -> None:
    """Logits of padding rows become -inf, so that every softmax over the sharded vocabulary is right unaided."""
    shard = bundle.padded_vocab_size // bundle.layout.tensor
    real = bundle.vocab_size - bundle.layout.tensor_rank * shard
    if real >= shard:
        return

    def hide(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        hidden = torch.arange(shard, device=logits.device) >= real
        return logits.masked_fill(hidden, float("-inf")), bias

    for stage in bundle.stages:
        if stage.post_process:
            stage.output_layer.register_forward_hook(hide)
