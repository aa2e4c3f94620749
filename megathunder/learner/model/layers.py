"""The layer spec of a model: Megatron-Core's own layers, or Transformer Engine's, with this package's attention.

    local                RmsNorm; linear layers of Megatron-Core
    transformer_engine   a norm fused with the linear layer behind it (linear_qkv, a dense linear_fc1); TENorm elsewhere
      with adapters      the same, the fused pairs apart: an adapter needs the normalised input

Attention is `PackedAttention` in all of them: rows of different lengths, and keys that were computed earlier.
Parameters of every variant have one name (`weights/names.canonical`). Called by `model.build_model`.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megathunder.config.kernels import ENGINE, INSTALL
from megathunder.errors import ConfigError
from megathunder.learner.model.attention import PackedAttention
from megathunder.learner.model.context_parallel import ContextAttention
from megathunder.learner.model.rmsnorm import RmsNorm

LINEAR: tuple[type, ...] = (ColumnParallelLinear, RowParallelLinear)
if HAVE_TE:
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TELinear,
        TENorm,
    )

    LINEAR = (*LINEAR, TELinear, TELayerNormColumnParallelLinear)


def layer_specs(
    config: TransformerConfig, chunk: int | None, layers: str, *, adapted: bool
) -> TransformerBlockSubmodules:
    """Megatron's layers of this stage; `adapted`: they will carry low-rank adapters."""
    engine = layers == ENGINE
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization="RMSNorm", vp_stage=chunk)
    attention = ContextAttention if config.context_parallel_size > 1 else PackedAttention
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.self_attention.submodules.core_attention = ModuleSpec(module=attention)
        if not engine:
            _use_own_norm(parts, qk=config.qk_layernorm)
        elif adapted:
            _take_apart(parts)
    if not engine:
        spec.layer_norm = RmsNorm
    return spec


def check_layers(layers: str) -> None:
    """Refuse Transformer Engine where Megatron-Core could not import it."""
    if layers == ENGINE and not HAVE_TE:
        raise ConfigError(
            "Transformer Engine is installed and Megatron-Core cannot import it",
            expected="a build for this machine's CUDA and torch; importing transformer_engine.pytorch says why",
            remedy=f"{INSTALL}; or set learner.layers = 'local'",
        )


def _use_own_norm(parts: TransformerLayerSubmodules, *, qk: bool) -> None:
    """Megatron-Core's wrapper of torch's norm refuses sequence parallelism."""
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    if qk:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RmsNorm


def _take_apart(parts: TransformerLayerSubmodules) -> None:
    """Norm and linear layer apart, each Transformer Engine's."""
    parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
    parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    if getattr(parts.mlp.submodules, "linear_fc1", None) is TELayerNormColumnParallelLinear:
        parts.mlp.submodules.linear_fc1 = TEColumnParallelLinear
