#!/usr/bin/env python
"""Make a larger policy that computes the same function: `python examples/policies/build/grow_policy.py IN OUT
--layers 16`.

Appended layers are residual blocks whose matrices are zero, x + 0, and appended inner units of the MLPs are zero, so
behaviour and rewards stay those of the small policy while engine and learner do the work of the large one. For
workloads that compare schedules (the weights are held still there): what is zero has zero gradients and cannot learn.
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
    """Make a larger policy that computes the same function."""

    source: tyro.conf.Positional[Path]
    """Hugging Face folder of the small policy (one safetensors file)."""
    target: tyro.conf.Positional[Path]
    """Folder to write; left alone when it already has these layers."""
    layers: int = 16
    """Layers of the large policy."""
    ffn: int = 384
    """Inner units of each of its MLPs."""


def grow(source: Path, target: Path, layers: int, ffn: int) -> bool:
    """Write `target`; False when it was there already. Raises ValueError when `source` is larger."""
    config = json.loads((source / "config.json").read_text())
    have, units = config["num_hidden_layers"], config["intermediate_size"]
    if layers < have or ffn < units:
        raise ValueError(f"{source} has {have} layers and {units} units; expected at most {layers} and {ffn}")
    grown = config | {"num_hidden_layers": layers, "intermediate_size": ffn}
    if "layer_types" in config:
        grown["layer_types"] = [config["layer_types"][0]] * layers
    done, text = target / "config.json", json.dumps(grown, indent=2) + "\n"
    stamp = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest() + text
    if (target / ".source").is_file() and (target / ".source").read_text() == stamp:
        return False
    target.mkdir(parents=True, exist_ok=True)
    weights = {name: widen(name, t, ffn - units) for name, t in load_file(source / "model.safetensors").items()}
    last = f"model.layers.{have - 1}."
    for layer in range(have, layers):
        for name in [n for n in weights if n.startswith(last)]:
            tensor = weights[name]
            fill = numpy.ones_like(tensor) if name.endswith("norm.weight") else numpy.zeros_like(tensor)
            weights[f"model.layers.{layer}." + name.removeprefix(last)] = fill
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, target / file.name)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    done.write_text(text)
    (target / ".source").write_text(stamp)
    return True


def widen(name: str, tensor: numpy.ndarray, more: int) -> numpy.ndarray:
    """`tensor` with `more` inner units of the MLP, all zero, where it has that axis."""
    if ".mlp.down_proj." in name:
        return numpy.pad(tensor, ((0, 0), (0, more)))
    return numpy.pad(tensor, ((0, more), (0, 0))) if ".mlp." in name else tensor


def main(arguments: Arguments) -> int:
    """See the module docstring; the exit status."""
    written = grow(arguments.source, arguments.target, arguments.layers, arguments.ffn)
    print(f"{arguments.target}: {arguments.layers} layers, ffn {arguments.ffn}{'' if written else ' (already there)'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
