"""Token ids as pieces of text that add up to what the whole decodes to. Called by `server.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

UNFINISHED = "\ufffd"  # what the first bytes of a character decode to
LONGEST = 4  # tokens that one character is spread over, at most


def load_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model folder; None where the folder is gone or has no tokenizer.json."""
    file = Path(model) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else None


def token_pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """One piece per token; of a character spread over several tokens the last one has it, the others are empty."""
    pieces: list[str] = []
    waiting: list[int] = []
    for token in token_ids:
        waiting.append(token)
        text = tokenizer.decode(waiting, skip_special_tokens=False)
        if text.endswith(UNFINISHED) and len(waiting) < LONGEST:
            pieces.append("")
            continue
        pieces.append(text)
        waiting = []
    if waiting:
        pieces[-1] = tokenizer.decode(waiting, skip_special_tokens=False)
    return pieces
