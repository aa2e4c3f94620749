"""Which tokens end a sampled turn: the one of the chat template, and all that the model's own files name.

    tokenizer.eos_token, `eos_token_id` (one or a list) of generation_config.json and of config.json

A server stops at any of them, so a turn that ends with any of them is whole. Called by the collector.
"""

from __future__ import annotations

import json
from pathlib import Path

FILES = ("generation_config.json", "config.json")


def end_token_ids(model: Path, template_end: int) -> tuple[int, ...]:
    """`template_end` first, then the others of the Hugging Face folder `model`, each once."""
    found = [template_end]
    for name in FILES:
        if (model / name).is_file():
            said = json.loads((model / name).read_text()).get("eos_token_id")
            found += said if isinstance(said, list) else [] if said is None else [said]
    return tuple(dict.fromkeys(found))
