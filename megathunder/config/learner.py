"""The model that learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import InputPath, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """[learner] model, parallel layout, accumulators and optimizer (Megatron-Core)."""

    model: InputPath = "examples/policies/student"
    """Hugging Face folder of the policy (config.json decides the architecture)."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Parameter and activation type; gradients accumulate in at least float32."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto`."""
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    """Whose linear layers and norms: Megatron-Core's own, or Transformer Engine's, which FP8 needs (`megatron.fp8`);
    auto: the latter on CUDA where it is installed."""
    cpu_cores: tuple[int, ...] = ()
    """Pin the learner ranks to these cores (one thread each); empty: no pinning."""
    cpu_kernels: Literal["off", "auto"] = "off"
    """On a CPU in float32: `off` is torch's own path; `auto` takes the faster exact GEMM (measured at the start), and
    norms and short-row attention of our own. Gradients are equal to rounding, but what is measured may differ between a
    run and its resume, which are the same bit for bit with `off` alone."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each matrix; divides the heads. Data parallelism is what the layout leaves of the ranks."""
    pipeline_parallel: PositiveInt = 1
    """Ranks that share the layers, in order."""
    expert_parallel: PositiveInt = 1
    """Ranks that share the experts of a mixture."""
    context_parallel: PositiveInt = 1
    """Ranks that share the tokens of one sequence."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence as well."""
    virtual_pipeline: PositiveInt = 1
    """Model chunks a pipeline stage holds (interleaved schedule)."""
    expert_tensor_parallel: NonNegativeInt = 0
    """Tensor parallelism of expert layers; 0: as `tensor_parallel`."""
    collective_timeout_s: PositiveFloat = 600.0
    """A collective that waits longer ends the job."""
    distributed_optimizer: bool = False
    """Shard optimizer state over data-parallel ranks."""
    recompute: Literal["none", "full", "selective"] = "none"
    """Activation recomputation."""
    accumulator: Literal["fp32", "exact"] = "fp32"
    """`fp32` sums in arrival order; `exact` sums in 64-bit fixed point, bit-identical in any order."""
    exact_range: PositiveFloat = 4096.0
    """`exact`: bound of an update's sum of |coefficient| x |gradient element|, not normalised; more is refused."""
    accumulator_placement: Literal["device", "host"] = "device"
    """Where accumulators of open groups live."""
    accumulator_shards: PositiveInt = 1
    """Ranks with the same parameters that form one cell and hold 1/n of each of its accumulators; 1: every rank pulls
    work alone and holds them whole. Costs a scratch of one accumulator and a reduce-scatter a micro-batch."""
    lora_rank: NonNegativeInt = 0
    """Rank of low-rank adapters; they alone are trained. 0: full fine-tuning."""
    lora_alpha: NonNegativeFloat = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers, by their Hugging Face names, that get an adapter; expert layers included."""
    lora_adapter: InputPath = ""
    """Folder of a PEFT-format adapter to start from; empty: random."""
    shared_prompt: Literal["off", "group", "packed"] = "off"
    """A group's prompt is computed once instead of once a trajectory: `group` once a cell and update, its activations
    held until the group is closed; `packed` once a micro-batch, nothing held."""
    optimizer: Literal["auto", "torch", "apex", "transformer_engine"] = "auto"
    """Whose AdamW: torch's, or the fused one of NVIDIA's apex or of Transformer Engine; auto: a fused one on CUDA where
    one is installed."""
    learning_rate: PositiveFloat = 5e-4
    """Step size of AdamW after the warm-up."""
    learning_rate_decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the step size goes from `learning_rate` to `min_learning_rate`, which it reaches at the last update."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Step size at the last update of a linear or cosine decay."""
    warmup_updates: NonNegativeInt = 0
    """Updates over which the step size rises from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled decay per step, of matrices only: norms, biases and other vectors do not decay."""
    adam_beta1: Annotated[float, Meta(ge=0, le=0.999999)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Meta(ge=0, le=0.999999)] = 0.95
    """Decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clip."""
    logprob_gap_alarm: NonNegativeFloat = 1.0
    """A row in which a token's log-probability differs by more than this (nats) between engine and learner is named in
    the log and counted; 0: no alarm."""
    max_logprob_gap: NonNegativeFloat = 0.0
    """A row with a difference above this adds nothing to the gradient (its reward still counts in its group); 0: all
    rows are trained."""
    max_bad_updates: PositiveInt = 3
    """Updates in a row with a NaN or infinite gradient before the run stops."""
    megatron: dict[str, str] = field(default_factory=dict)
    """Further TransformerConfig, OptimizerConfig or DDP fields by name, as strings."""

    @property
    def expert_tensor(self) -> int:
        """Tensor parallelism of expert layers."""
        return self.expert_tensor_parallel or self.tensor_parallel

    @property
    def ranks_of_a_cell(self) -> int:
        """Ranks coupled by collectives of a forward pass, or by accumulators that they share. A stage's ranks are
        shared out in runs of tensor x context, of expert tensor x expert, and of tensor x shards; all of these begin
        anew together at common multiples only."""
        dense, expert = self.tensor_parallel * self.context_parallel, self.expert_tensor * self.expert_parallel
        return self.pipeline_parallel * math.lcm(dense, expert, self.tensor_parallel * self.accumulator_shards)

    @property
    def replicas_per_cell(self) -> int:
        """Data-parallel replicas inside one cell."""
        return self.ranks_of_a_cell // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def experts_couple_replicas(self) -> bool:
        """Experts are spread over replicas: all replicas of a cell must run the same number of passes."""
        return self.tensor_parallel * self.context_parallel % (self.expert_parallel * self.expert_tensor) != 0

    @property
    def grouped_experts(self) -> bool:
        """The experts of a layer are computed as one grouped product."""
        return self.megatron.get("moe_grouped_gemm", "false").lower() in ("true", "1")
