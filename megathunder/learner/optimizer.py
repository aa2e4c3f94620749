"""The step at the barrier: gradients are complete, so reduce once, normalise once, clip once, step once.

    g = (sum over data-parallel ranks of the batch accumulator) / Z
    g <- g min(1, clip / (|g| + 1e-6)),   AdamW step at the learning rate of this update

Learning rate of update k (counted from 0; every update counts, also one that makes no step): rises linearly over
`warmup_updates`, then stays, or falls to `min_learning_rate` at the last update (`learning_rate_decay`).
Weight decay takes matrices only: Megatron gives norms, biases and other vectors a `wd_mult` of 0.
Adam's own step counter counts steps taken. A gradient with a NaN or infinite element makes no step: it is counted and
its parameters are named; `max_bad_updates` in a row end the run. Every rank comes to the same decision, because the
norm and the flag are reduced over all ranks. Called by `learner.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from megathunder.config.kernels import choose_optimizer
from megathunder.config.learner import LearnerConfig
from megathunder.errors import MegathunderError
from megathunder.learner.accumulators.layout import GradientLayout
from megathunder.learner.model.bundle import DTYPES, ModelBundle
from megathunder.learner.options import megatron_options

DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda share: 1.0,
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
}
"""Share of the run after the warm-up, 0 to 1 -> share of the way from `min_learning_rate` to `learning_rate`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the barrier did. `grad_norm` is that of the normalised gradient before the clip."""

    stepped: bool
    grad_norm: float
    learning_rate: float
    skip_reason: str = ""


def wrap(bundle: ModelBundle, config: LearnerConfig) -> list[DistributedDataParallel]:
    """Megatron's DDP around each stage: flat gradient buffers, no reduction until it is asked for."""
    bundle.transformer_config.calculate_per_token_loss = True  # sums, not means, over data-parallel ranks
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.dtype != "float64",
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.distributed_optimizer,
        **megatron_options(config.megatron).ddp,
    )
    return [DistributedDataParallel(bundle.transformer_config, settings, stage) for stage in bundle.stages]


def build_optimizer(chunks: list[DistributedDataParallel], config: LearnerConfig) -> MegatronOptimizer:
    """Megatron's AdamW (sharded over data-parallel ranks with `distributed_optimizer`), on `config.optimizer`'s."""
    _choose_adam(choose_optimizer(config, cuda=next(chunks[0].parameters()).is_cuda))
    dtype = DTYPES[config.dtype]
    settings = {
        "optimizer": "adam",
        "lr": config.learning_rate,
        "min_lr": config.min_learning_rate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_eps": config.adam_epsilon,
        "clip_grad": 0.0,  # clipped here, in the gradient's own precision
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.distributed_optimizer,
    }
    options = megatron_options(config.megatron).optimizer
    return get_megatron_optimizer(OptimizerConfig(**(settings | options)), chunks)


def _choose_adam(name: str) -> None:
    """Megatron-Core takes the first it finds, also on a CPU; here it takes the one that is asked for."""
    if name == "transformer_engine":
        from transformer_engine.pytorch.optimizers import FusedAdam as adam
    elif name == "apex":
        from apex.optimizers import FusedAdam as adam
    else:
        from torch.optim import AdamW as adam
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = adam, name == "torch"


class Stepper:
    """Holds the optimizer and the count of updates. `updates` is the length of the run, for the cosine."""

    def __init__(
        self, chunks: list[DistributedDataParallel], layout: GradientLayout, config: LearnerConfig, updates: int
    ) -> None:
        self.optimizer = build_optimizer(chunks, config)
        self._chunks, self._layout, self._config, self._updates = chunks, layout, config, updates
        self.updates_done = self.steps_taken = 0
        self.bad_in_a_row = 0

    def learning_rate(self, update: int) -> float:
        """Of update `update`, counted from 0."""
        config = self._config
        if update < config.warmup_updates:
            return config.learning_rate * (update + 1) / config.warmup_updates
        span = max(1, self._updates - config.warmup_updates - 1)
        share = min(1.0, (update - config.warmup_updates) / span)
        low = config.min_learning_rate
        return low + (config.learning_rate - low) * DECAY[config.learning_rate_decay](share)

    def reduce(self) -> None:
        """Sum Megatron's gradient buffers over data-parallel ranks (and what tensor and pipeline ranks share)."""
        finalize_model_grads(list(self._chunks))

    def step(self, normaliser: float, *, skip: bool) -> StepResult:
        """Divide, clip and step on reduced buffers; with `skip` only the counters move."""
        rate = self.learning_rate(self.updates_done)
        self.updates_done += 1
        if skip or normaliser == 0:
            reason = "no contribution has a coefficient other than 0" if skip else "normaliser 0"
            return StepResult(stepped=False, grad_norm=0.0, learning_rate=rate, skip_reason=reason)
        for home in self._layout.homes:
            home.div_(normaliser)
        self.optimizer.prepare_grads()
        norm = self.grad_norm()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            return self._bad(norm, rate)
        self.bad_in_a_row = 0
        limit = self._config.clip_grad
        if limit > 0 and norm > limit:
            torch._foreach_mul_(self._ready_grads(), limit / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)
        self.optimizer.step_with_ready_grads()
        self.steps_taken += 1
        # `param.grad` is a view of the buffer now; left there, the next backward would add into it a second time.
        self.optimizer.zero_grad()
        return StepResult(stepped=True, grad_norm=norm, learning_rate=rate)

    def grad_norm(self) -> float:
        """Global 2-norm, each parameter counted once; squares are summed in float64 over all model-parallel ranks."""
        total, device = 0.0, self._layout.homes[0].device
        for part in _parts(self.optimizer):
            grads = part.get_main_grads_for_grad_norm()
            square = torch.zeros((), dtype=torch.float64, device=device)
            if grads:
                square = torch.stack(torch._foreach_norm(grads)).to(torch.float64).square().sum()
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
            total += float(square)
        # One more reduction, so that ranks whose sums differ in the last bit still agree on step or no step.
        norm = torch.tensor(math.sqrt(total) if math.isfinite(total) else math.inf, dtype=torch.float64, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return float(norm)

    def _ready_grads(self) -> list[Tensor]:
        found = [p for part in _parts(self.optimizer) for p in part.get_parameters()]
        return [p.grad for p in found if p.grad is not None]

    def _not_finite(self) -> list[str]:
        """Parameters with a NaN or infinite gradient on any rank; under a pipeline, of which stage."""
        stage = mpu.get_pipeline_model_parallel_rank() if mpu.get_pipeline_model_parallel_world_size() > 1 else None
        where = "" if stage is None else f"stage {stage}: "
        views = zip(self._layout.names, self._layout.home_views, strict=True)
        mine = [where + name for name, view in views if not bool(torch.isfinite(view).all())]
        everyone: list[list[str]] = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return list(dict.fromkeys(name for names in everyone for name in names))

    def _bad(self, norm: float, rate: float) -> StepResult:
        self.bad_in_a_row += 1
        names = self._not_finite()
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        reason = f"gradient is not finite in {where}"
        if self.bad_in_a_row >= self._config.max_bad_updates:
            raise MegathunderError(
                f"{self.bad_in_a_row} updates in a row without a finite gradient: {reason}. Lower "
                "learner.learning_rate, or raise learner.max_bad_updates to go on without these updates"
            )
        return StepResult(stepped=False, grad_norm=norm, learning_rate=rate, skip_reason=reason)


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]
