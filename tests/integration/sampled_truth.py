"""Whether sampled tokens follow a model's distribution: statistics that need no bound on how they depend.

    u_t = P(tokens likelier than y_t | context) + v P(y_t | context), v uniform
    uniform, and independent over t, if y is sampled from P

`uniformity` tests the first, `pairs` that neighbours are independent, `pooled` compares the token counts of two sets of
requests by exchanging whole requests (tokens within a request are dependent). All return p values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Drawn(NamedTuple):
    """One request: its prompt, what was sampled, and the log-probabilities it came with."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Cut(NamedTuple):
    """How a distribution is cut before sampling, by SGLang's names."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


def cut(probabilities: torch.Tensor, how: Cut) -> torch.Tensor:
    """`probabilities` [..., V] after top-k, top-p and min-p, normalised."""
    ordered, places = probabilities.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    if how.top_k > 0:
        ordered[..., how.top_k :] = 0
    ordered[before > how.top_p] = 0
    if how.min_p > 0:
        ordered[ordered < ordered[..., :1] * how.min_p] = 0
    kept = torch.zeros_like(probabilities).scatter_(-1, places, ordered)
    return kept / kept.sum(-1, keepdim=True)


def transformed(model: torch.nn.Module, drawn: list[Drawn], how: Cut) -> tuple[torch.Tensor, float]:
    """u of every token, [requests, T], and the largest difference of a log-probability from the model's own."""
    ids = torch.tensor([d.prompt + d.tokens for d in drawn])
    first = len(drawn[0].prompt)
    with torch.no_grad():
        logits = torch.cat([model(part).logits[:, first - 1 : -1] for part in ids.split(100)]) / how.temperature
    tokens = ids[:, first:, None]
    said = torch.tensor([d.logprobs for d in drawn])
    worst = (torch.log_softmax(logits, -1).gather(-1, tokens)[..., 0] - said).abs().max().item()
    kept = cut(torch.softmax(logits.double(), -1), how)
    share = kept.gather(-1, tokens)[..., 0]
    ordered, places = kept.sort(-1, descending=True)
    ahead = (ordered.cumsum(-1) - ordered).gather(-1, (places == tokens).long().argmax(-1, keepdim=True))[..., 0]
    generator = torch.Generator().manual_seed(0)
    return ahead + share * torch.rand(share.shape, generator=generator, dtype=torch.float64), worst


def uniformity(u: torch.Tensor) -> float:
    counts = torch.histc(u.float(), 20, 0, 1)
    return _chi_square(counts, u.numel() / 20)


def pairs(u: torch.Tensor) -> float:
    cells = (u * 10).long().clamp(0, 9)
    counts = torch.bincount((cells[:, :-1] * 10 + cells[:, 1:]).flatten(), minlength=100)
    return _chi_square(counts.float(), counts.sum().item() / 100)


def pooled(a: list[Drawn], b: list[Drawn], vocabulary: int, rounds: int = 400) -> float:
    counts = torch.stack([torch.bincount(torch.tensor(d.tokens), minlength=vocabulary) for d in (*a, *b)]).double()
    total, generator = counts.sum(0), torch.Generator().manual_seed(0)

    def distance(rows: torch.Tensor) -> float:
        ours = counts[rows].sum(0)
        return ((2 * ours - total) ** 2 / total.clamp(min=1)).sum().item()

    seen = distance(torch.arange(len(a)))
    as_far = sum(distance(torch.randperm(len(counts), generator=generator)[: len(a)]) >= seen for _ in range(rounds))
    return (as_far + 1) / (rounds + 1)


def _chi_square(counts: torch.Tensor, expected: float) -> float:
    """p of the counts under equal expectation (Wilson and Hilferty's approximation)."""
    statistic, freedom = ((counts - expected) ** 2 / expected).sum().item(), len(counts) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))
