"""Pass-through of Megatron-Core settings: `[learner.megatron]` takes any field of three of its classes by name.

    TransformerConfig                 -> MegatronOptions.transformer
    OptimizerConfig                   -> MegatronOptions.optimizer
    DistributedDataParallelConfig     -> MegatronOptions.ddp

A name that several classes have goes to each. Values arrive as strings and are parsed to the field's declared type.
Called by `model.build_model` and by the optimizer's builder. Refuses unknown names (naming the nearest), values of the
wrong type, callables, names that a setting of `[learner]` already owns, and fields under which no update is exact.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megathunder.errors import ConfigError

# Fields that a setting of [learner], or the model folder, decides.
_OWNED = {
    "tensor_model_parallel_size": "learner.tensor_parallel",
    "pipeline_model_parallel_size": "learner.pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "learner.virtual_pipeline",
    "context_parallel_size": "learner.context_parallel",
    "expert_model_parallel_size": "learner.expert_parallel",
    "expert_tensor_parallel_size": "learner.expert_tensor_parallel",
    "sequence_parallel": "learner.sequence_parallel",
    "params_dtype": "learner.dtype",
    "bf16": "learner.dtype",
    "recompute_granularity": "learner.recompute",
    "use_distributed_optimizer": "learner.distributed_optimizer",
    "lr": "learner.learning_rate",
    "min_lr": "learner.min_learning_rate",
    "weight_decay": "learner.weight_decay",
    "adam_beta1": "learner.adam_beta1",
    "adam_beta2": "learner.adam_beta2",
    "adam_eps": "learner.adam_epsilon",
    "clip_grad": "learner.clip_grad",
    "num_layers": "learner.model",
    "hidden_size": "learner.model",
    "num_attention_heads": "learner.model",
    "num_query_groups": "learner.model",
    "kv_channels": "learner.model",
    "ffn_hidden_size": "learner.model",
    "num_moe_experts": "learner.model",
    "transformer_impl": "learner.layers",
    "fp16": "learner.dtype",
}

# Fields that would run and be wrong, or undo what an exact streamed update stands on.
_ONE_REDUCTION = "gradients are reduced once, at the step, after any number of backward passes"
_LINEAR = "a gradient is linear in its trajectory's coefficient, which an auxiliary loss is not"
_REFUSED = {
    "overlap_grad_reduce": _ONE_REDUCTION,
    "overlap_param_gather": _ONE_REDUCTION,
    "average_in_collective": "gradients are summed over ranks and divided by the batch's normaliser",
    "calculate_per_token_loss": "gradients are summed over ranks and divided by the batch's normaliser",
    "grad_reduce_in_fp32": "gradients accumulate in float32, or in float64 with that learner.dtype",
    "use_megatron_fsdp": "accumulators have the layout of Megatron's flat gradient buffers",
    "delay_wgrad_compute": "a backward pass adds to the accumulator that is current while it runs",
    "moe_router_load_balancing_type": _LINEAR,
    "moe_aux_loss_coeff": _LINEAR,
    "moe_z_loss_coeff": _LINEAR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """Typed keyword arguments for Megatron-Core's constructors; the keys are its field names."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


def megatron_options(given: Mapping[str, str]) -> MegatronOptions:
    """Sort and parse the pass-through fields. Raises ConfigError."""
    classes = _classes()
    sorted_fields: dict[str, dict[str, Any]] = {owner: {} for owner in classes}
    for name, text in given.items():
        if name in _OWNED:
            raise ConfigError(
                f"learner.megatron.{name} = {text!r}",
                expected=f"this to be set through {_OWNED[name]}",
                remedy=f"remove it from [learner.megatron] and set {_OWNED[name]}",
            )
        if name in _REFUSED:
            raise ConfigError(
                f"learner.megatron.{name} = {text!r}",
                expected=_REFUSED[name],
                remedy="remove it from [learner.megatron]",
            )
        owners = [owner for owner, fields in classes.items() if name in fields]
        if not owners:
            _refuse_unknown(name, sorted({f for fields in classes.values() for f in fields}))
        for owner in owners:
            sorted_fields[owner][name] = _parse(name, text, classes[owner][name])
    return MegatronOptions(**sorted_fields)


def _classes() -> dict[str, dict[str, Any]]:
    """Owner -> field name -> declared type."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    owners = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    return {owner: {f.name: _declared(cls, f) for f in dataclasses.fields(cls)} for owner, cls in owners.items()}


def _declared(cls: type, field: dataclasses.Field[Any]) -> Any:
    if not isinstance(field.type, str):
        return field.type
    return typing.get_type_hints(cls).get(field.name, str)


def _refuse_unknown(name: str, known: list[str]) -> None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ConfigError(
        f"learner.megatron.{name} is no field of TransformerConfig, OptimizerConfig or DistributedDataParallelConfig",
        expected="a field of one of the three in the installed Megatron-Core",
        remedy=f"did you mean {near[0]}?" if near else "remove it",
    )


def _parse(name: str, text: str, declared: Any) -> Any:
    options = typing.get_args(declared) if _is_union(declared) else (declared,)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    for option in options:
        try:
            return _parse_one(text, option)
        except (ValueError, KeyError):
            continue
    wanted = " or ".join(_described(option) for option in options)
    raise ConfigError(
        f"learner.megatron.{name} = {text!r}", expected=f"a value of {wanted}", remedy="correct or remove it"
    )


def _described(declared: Any) -> str:
    """A type as a person writes its values."""
    if typing.get_origin(declared) is typing.Literal:
        return ", ".join(map(repr, typing.get_args(declared)))
    return "none" if declared is type(None) else getattr(declared, "__name__", str(declared))


def _is_union(declared: Any) -> bool:
    return typing.get_origin(declared) in (typing.Union, types.UnionType)


def _parse_one(text: str, declared: Any) -> Any:
    """The value of `text` as type `declared`; ValueError or KeyError where it is none."""
    if declared is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if declared in (int, float, str):
        return declared(text)
    if declared is torch.dtype:
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    origin = typing.get_origin(declared) or declared
    if origin is typing.Literal and text in map(str, typing.get_args(declared)):
        return next(choice for choice in typing.get_args(declared) if str(choice) == text)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin[text]
    if origin in (list, tuple) and isinstance(value := json.loads(text), list):
        return origin(value)
    raise ValueError(text)
