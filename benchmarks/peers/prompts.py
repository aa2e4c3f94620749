"""The prompts of a workload, as rows that both trainers read: {"prompt": [{"role": "user", "content": ...}]}."""

from __future__ import annotations

import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.peers.workload import Workload

WORDS = [
    "read",
    "the",
    "file",
    "and",
    "count",
    "lines",
    "that",
    "name",
    "a",
    "find",
    "sum",
    "of",
    "numbers",
    "in",
    "folder",
    "then",
    "submit",
    "answer",
]
ROWS = 256


def write_prompts(file: Path, policy: Path, workload: Workload) -> None:
    """`ROWS` different prompts of `prompt_tokens` tokens, one more or less."""
    rng, tokenizer = random.Random(workload.seed), AutoTokenizer.from_pretrained(policy)

    def tokens(words: list[str]) -> int:
        messages = [{"role": "user", "content": " ".join(words)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return len(tokenizer.encode(text, add_special_tokens=False))

    with file.open("w") as out:
        for _ in range(ROWS):
            words = [rng.choice(WORDS)]
            while tokens([*words, "a"]) < workload.prompt_tokens:
                words.append(rng.choice(WORDS))
            message = {"role": "user", "content": " ".join(words)}
            out.write(json.dumps({"prompt": [message]}) + "\n")
