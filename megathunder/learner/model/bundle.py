"""What a rank holds of the policy, and everything that describes it. Made by `build_model.py`, read by
everybody else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megathunder.learner.model.families.rules import Family
from megathunder.learner.parallel import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(slots=True, kw_only=True)
class ModelBundle:
    """This rank's part of the policy and everything that describes it."""

    stages: list[GPTModel] = field(repr=False)
    transformer_config: TransformerConfig = field(repr=False)
    family: Family = field(repr=False)
    hf: dict[str, Any] = field(repr=False)  # config.json
    folder: Path
    layout: Layout
    vocab_size: int
    padded_vocab_size: int  # a multiple of the tensor-parallel size; logits of the padding are -inf
    adapter_scale: float = 0.0  # lora_alpha / lora_rank; 0 without adapters
    plans: dict[str, Any] = field(default_factory=dict, repr=False)  # who sends what: made once by `weights/gather.py`

    @property
    def tied(self) -> bool:
        """Whether the output layer is the transposed embedding."""
        return bool(self.hf.get("tie_word_embeddings", False))

    @property
    def token_share(self) -> int:
        """Ranks that hold equal shares of a micro-batch's tokens between layers."""
        config = self.transformer_config
        return config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)

    @property
    def pad_to(self) -> int:
        """What the tokens of a micro-batch must be a multiple of; FP8 products want a rank's share in whole tiles."""
        config = self.transformer_config
        return self.token_share * (get_fp8_align_size(config.fp8_recipe) if config.fp8 else 1)

    @property
    def adapted(self) -> bool:
        """Whether low-rank adapters are what is trained."""
        return self.adapter_scale != 0.0

    @property
    def local_parameters(self) -> int:
        """Parameters held by this rank."""
        return sum(p.numel() for stage in self.stages for p in stage.parameters())
