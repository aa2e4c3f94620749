"""How Hugging Face tensors become a Megatron parameter and its shard, and back; pure functions of tensors.

    merge : parts (Hugging Face, full)  -> parameter (Megatron, full)        split   is its inverse
    shard : parameter (full)            -> the part of one rank of `size`    unshard is its inverse

The kinds are those of `families/rules.py`. Both directions are copies, so a round trip is bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megathunder.learner.model.families.rules import Kind, head_dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What a layout must know of the model: G key/value groups of `heads` query heads of size `head`; vocabularies."""

    groups: int
    heads: int
    head: int
    vocab: int
    padded_vocab: int

    @classmethod
    def of(cls, hf: dict[str, Any], padded_vocab: int) -> Dimensions:
        groups = hf.get("num_key_value_heads") or hf["num_attention_heads"]
        return cls(
            groups=groups,
            heads=hf["num_attention_heads"] // groups,
            head=head_dimensions(hf),
            vocab=hf["vocab_size"],
            padded_vocab=padded_vocab,
        )

    @classmethod
    def of_rank(cls, hf: dict[str, Any], sharers: int) -> Dimensions:
        """Those of one of `sharers` tensor-parallel ranks; for layers, not for vocabularies."""
        whole = cls.of(hf, hf["vocab_size"])
        return cls(
            groups=whole.groups // sharers,
            heads=whole.heads,
            head=whole.head,
            vocab=whole.vocab,
            padded_vocab=whole.padded_vocab,
        )


def merge(kind: Kind, parts: list[Tensor], dims: Dimensions) -> Tensor:
    """The full Megatron parameter of its Hugging Face parts."""
    if kind is Kind.QKV:
        by_group = [part.reshape(dims.groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_group, dim=1).flatten(0, 1)
    if kind is Kind.GATE_UP:
        return torch.cat(parts, dim=0)
    if kind is Kind.VOCAB and dims.padded_vocab > parts[0].shape[0]:
        padding = parts[0].new_zeros(dims.padded_vocab - parts[0].shape[0], *parts[0].shape[1:])
        return torch.cat((parts[0], padding), dim=0)
    return parts[0]


def split(kind: Kind, full: Tensor, dims: Dimensions) -> list[Tensor]:
    """The Hugging Face parts of a full Megatron parameter, in the order of its rule."""
    if kind is Kind.QKV:
        by_group = full.reshape(dims.groups, -1, *full.shape[1:])
        sizes = [dims.heads * dims.head, dims.head, dims.head]
        return [part.flatten(0, 1).contiguous() for part in by_group.split(sizes, dim=1)]
    if kind is Kind.GATE_UP:
        return [part.contiguous() for part in full.chunk(2, dim=0)]
    if kind is Kind.VOCAB:
        return [full[: dims.vocab]]
    return [full]


def shard(kind: Kind, full: Tensor, rank: int, size: int) -> Tensor:
    """The part of `full` that rank `rank` of `size` tensor-parallel ranks holds."""
    if size == 1 or kind is Kind.WHOLE:
        return full
    if kind is Kind.GATE_UP:
        return torch.cat([half.chunk(size, dim=0)[rank] for half in full.chunk(2, dim=0)], dim=0)
    return full.chunk(size, dim=1 if kind is Kind.ROW else 0)[rank]


def unshard(kind: Kind, shards: list[Tensor]) -> Tensor:
    """The full parameter of the shards of all ranks, in rank order."""
    if len(shards) == 1:
        return shards[0]
    if kind is Kind.GATE_UP:
        halves = [part.chunk(2, dim=0) for part in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=0)
    return torch.cat(shards, dim=1 if kind is Kind.ROW else 0)
