#!/usr/bin/env python
"""Make a mixture-of-experts policy of a dense one: `python examples/policies/build/upcycle_policy.py IN OUT
--experts 4`.

Every expert starts as a copy of the dense MLP plus noise, and the router is random (sparse upcycling, Komatsuzaki et
al. 2023). The weights of the chosen experts sum to 1, so without noise the mixture computes the dense policy's
function: it samples as well, earns the same mixed rewards, and every expert learns from the first update on.
Writes Qwen3-MoE with the tokenizer of IN; refuses anything but a Qwen3 policy in one safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy
import tyro
from safetensors.numpy import load_file, save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Make a mixture-of-experts policy of a dense one."""

    source: tyro.conf.Positional[Path]
    """Hugging Face folder of the dense Qwen3 policy (one safetensors file)."""
    target: tyro.conf.Positional[Path]
    """Folder to write; left alone when it already holds this mixture."""
    experts: int = 4
    """Experts a layer."""
    chosen: int = 2
    """Experts a token goes to."""
    noise: float = 0.02
    """Standard deviation of what sets experts apart, relative to that of each matrix."""
    seed: int = 0
    """Seed of the noise and of the router."""


def upcycle(arguments: Arguments) -> bool:
    """Write the folder; False when it was there already. Raises ValueError for another architecture."""
    source, target = arguments.source, arguments.target
    dense = json.loads((source / "config.json").read_text())
    if dense["model_type"] != "qwen3":
        raise ValueError(f"{source} is a {dense['model_type']} policy; expected qwen3")
    text = json.dumps(mixture_config(dense, arguments), indent=2) + "\n"
    stamp = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest() + f"{arguments}" + text
    if (target / ".source").is_file() and (target / ".source").read_text() == stamp:
        return False
    target.mkdir(parents=True, exist_ok=True)
    weights = mixture_weights(load_file(source / "model.safetensors"), arguments)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target / file.name)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(text)
    (target / ".source").write_text(stamp)
    return True


def mixture_config(dense: dict, arguments: Arguments) -> dict:
    """config.json of the mixture."""
    return dense | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.chosen,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,  # the engine's mixtures have an output matrix of their own
    }


def mixture_weights(dense: dict[str, numpy.ndarray], arguments: Arguments) -> dict[str, numpy.ndarray]:
    """Experts, routers and everything else as it was."""
    generator = numpy.random.default_rng(arguments.seed)
    weights = {}
    for name, tensor in sorted(dense.items()):
        layer, of_mlp, matrix = name.partition(".mlp.")
        if not of_mlp:
            weights[name] = tensor
            continue
        spread = arguments.noise * tensor.std()
        for expert in range(arguments.experts):
            apart = generator.standard_normal(tensor.shape, dtype=numpy.float32) * spread
            weights[f"{layer}.mlp.experts.{expert}.{matrix}"] = (tensor + apart).astype(tensor.dtype)
        if matrix == "gate_proj.weight":
            router = generator.standard_normal((arguments.experts, tensor.shape[1]), dtype=numpy.float32)
            weights[f"{layer}.mlp.gate.weight"] = (router / tensor.shape[1] ** 0.5).astype(tensor.dtype)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].copy())
    return weights


def main(arguments: Arguments) -> int:
    """See the module docstring; the exit status."""
    written = upcycle(arguments)
    print(f"{arguments.target}: {arguments.experts} experts a layer{'' if written else ' (already there)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
