"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight     [r, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight     [out, r]

Written from the cell's leader with the shards of all ranks, one tensor at a time; read by every rank for itself. Called
by `model.build_model`, checkpoints and publication. Refuses an adapter of another rank, scale or set of layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.families.rules import Kind
from megathunder.learner.model.lora import Adapter
from megathunder.learner.model.weights import layouts
from megathunder.learner.model.weights.gather import gather, part_of
from megathunder.learner.model.weights.hf_files import HfWriter
from megathunder.learner.model.weights.local import ADAPTER, local_modules
from megathunder.learner.model.weights.names import Named

_PREFIX = "base_model.model."
_NAME = re.compile(r"\.(?P<part>\w+)\.lora_[AB]\.weight$")
_PLAIN = {
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""What PEFT's LoraConfig says of a plain adapter."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_tensors(bundle: ModelBundle) -> Iterator[tuple[Named, Tensor]]:
    """This rank's A and B of every adapted layer, under PEFT's names."""
    for linear, named in local_modules(bundle):
        adapter: Adapter | None = getattr(linear, ADAPTER, None)
        for part in adapter.targets if adapter is not None else ():
            sides = (("A", adapter.a(part), Kind.ROW), ("B", adapter.b(part), Kind.COLUMN))
            for side, tensor, sharded in sides:
                kind = sharded if (side == "A") == adapter.row else Kind.WHOLE
                hf = f"{_PREFIX}{part}.lora_{side}.weight"
                # `.local_experts.` in the name says which ranks share it.
                marker = f"{named.megatron}.{ADAPTER}.{side}.{part}"
                yield Named(megatron=marker, kind=kind, hf=(hf,)), tensor


def export_adapter(
    bundle: ModelBundle,
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor.data,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(PEFT name, full tensor) on the cell's leader; every rank of the cell must exhaust it."""
    for named, full in gather(bundle, list(adapter_tensors(bundle)), read, what="adapters", dtype=dtype):
        yield named.hf[0], full


def save_adapter(bundle: ModelBundle, config: LearnerConfig, folder: Path) -> None:
    """Write a PEFT adapter folder; every rank of the cell calls it."""
    writer = HfWriter(folder, file_bytes=2**63, single=WEIGHTS) if bundle.layout.leads_cell else None
    for name, tensor in export_adapter(bundle):
        writer.write(name, tensor)
    if writer is not None:
        writer.close()
        description = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": str(bundle.folder),
            "r": config.lora_rank,
            "lora_alpha": config.lora_alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(config.lora_targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n")


@torch.no_grad()
def load_adapter(bundle: ModelBundle, config: LearnerConfig, folder: Path) -> None:
    """Fill this rank's adapters from a PEFT folder. Raises ConfigError where it does not fit."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"no PEFT adapter in {folder}",
            expected=f"{CONFIG} and {WEIGHTS}",
            remedy="set learner.lora_adapter to a folder that save_pretrained of PEFT, or this trainer, wrote",
        )
    stored = json.loads((folder / CONFIG).read_text())
    if (stored["r"], float(stored["lora_alpha"])) != (config.lora_rank, config.lora_alpha):
        raise ConfigError(
            f"an adapter of rank {stored['r']}, alpha {stored['lora_alpha']}",
            expected=f"learner.lora_rank {config.lora_rank}, learner.lora_alpha {config.lora_alpha}",
            remedy=f"set learner.lora_rank={stored['r']} learner.lora_alpha={stored['lora_alpha']}",
        )
    _check_kind(stored, folder)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        _check_names(names, config, folder)
        for named, tensor in adapter_tensors(bundle):
            if named.hf[0] not in names:
                raise ConfigError(
                    f"{folder} has no {named.hf[0]}",
                    expected=f"adapters of {', '.join(config.lora_targets)} in every layer",
                    remedy=f"set learner.lora_targets to the adapter's: {', '.join(stored['target_modules'])}",
                )
            full = file.get_tensor(named.hf[0])
            tensor.copy_(layouts.shard(named.kind, full, *part_of(bundle, named)))


def _check_kind(stored: dict[str, Any], folder: Path) -> None:
    """Refuse what would load and mean something else: other scales, other factors, further weights."""
    for field, plain in _PLAIN.items():
        if (given := stored.get(field, plain)) and given != plain:
            raise ConfigError(
                f"{folder / CONFIG}: {field} = {given!r}",
                expected=f"{plain!r}: W + (alpha / r) B A, one rank and one scale, and no other weights",
                remedy="merge it into the model with PEFT (merge_and_unload), and start from that",
            )


def _check_names(names: set[str], config: LearnerConfig, folder: Path) -> None:
    found = {name: _NAME.search(name) for name in sorted(names)}
    for name, match in found.items():
        if match is None or match["part"] not in config.lora_targets:
            parts = sorted({m["part"] for m in found.values() if m})
            raise ConfigError(
                f"{folder} has {name}, which learner.lora_targets does not name",
                expected=f"adapters of {', '.join(config.lora_targets)} alone",
                remedy=f"set learner.lora_targets to the adapter's: {', '.join(parts)}",
            )
