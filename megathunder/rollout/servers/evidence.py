"""What a server says about tokens is checked before it is trained on.

    sampled tokens    1 to `max_new_tokens` ids of the vocabulary, each with a log-probability and a policy version
    scored tokens     exactly the ids asked for, each with a log-probability
    log-probability   finite, at most 0 (rounding aside), at least FLOOR where it was sampled, SCORED_FLOOR where scored

Raises BadEvidence with what was seen and what was expected. `engine.py` repeats such a request; an answer that is bad
twice in the same way costs the trajectory, with that reason. Called by `client.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.protocol import GenerateAnswer, MetaInfo, policy_version

ROUNDING = 1e-3  # a log-softmax of a certain token may come out this far above 0
FLOOR = -100.0  # no token of probability e^-100 is ever sampled; SGLang fills what it masks with -9999
SCORED_FLOOR = -5000.0  # a teacher may find a student's token absurd, within the range of logits


class BadEvidence(InfrastructureFailure):
    """An answer that cannot be what the model computed."""


def sampled_logprobs(answer: GenerateAnswer, *, most_tokens: int, vocab_size: int) -> tuple[float, ...]:
    """The log-probabilities of the sampled tokens, [T] with T in 1..most_tokens. `vocab_size` 0: not known."""
    ids, listed = answer.output_ids, answer.meta_info.output_token_logprobs
    if not 1 <= len(ids) <= most_tokens:
        raise BadEvidence(f"{len(ids)} sampled tokens, expected 1 to {most_tokens}")
    if tuple(token for _, token, _ in listed) != ids:
        raise BadEvidence(f"{len(ids)} sampled tokens with log-probabilities of {len(listed)} that are not the same")
    strange = [token for token in ids if token < 0 or (vocab_size and token >= vocab_size)]
    if strange:
        raise BadEvidence(f"token id {strange[0]} of a vocabulary of {vocab_size or 'ids from 0'}")
    return _checked([value for value, _, _ in listed], FLOOR)


def scored_logprobs(answer: GenerateAnswer, expected: Sequence[int]) -> tuple[float, ...]:
    """The log-probabilities of the `expected` ids, [T]; the entry before them opens the server's list."""
    scored = answer.meta_info.input_token_logprobs[1:]
    if [token for _, token, _ in scored] != list(expected):
        raise BadEvidence(f"{len(scored)} scored tokens that are not the {len(expected)} of the request")
    return _checked([value for value, _, _ in scored], SCORED_FLOOR)


def token_versions(meta: MetaInfo, tokens: int) -> tuple[int, ...]:
    """The policy version of each of `tokens` sampled tokens."""
    if not meta.weight_versions:
        return (policy_version(meta.weight_version),) * tokens
    spans = meta.weight_versions
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges != sorted(edges) or edges[-1] != tokens:
        said = ", ".join(f"{span.start}-{span.end}" for span in spans)
        raise BadEvidence(f"weight versions of tokens {said}, expected spans that cover {tokens} sampled tokens")
    return tuple(policy_version(span.version) for span in spans for _ in range(span.start, span.end))


def vocab_size(model: Path) -> int:
    """Of the model in a Hugging Face folder; 0 where its config.json does not say."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return 0
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0)


def _checked(logprobs: Sequence[float | None], floor: float) -> tuple[float, ...]:
    for position, value in enumerate(logprobs):
        if value is None or not math.isfinite(value) or not floor <= value <= ROUNDING:
            raise BadEvidence(f"log-probability {value} at token {position}, expected {floor:g} to 0")
    return tuple(min(value, 0.0) for value in logprobs)
