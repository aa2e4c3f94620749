"""A frozen model with random adapters on its linear layers, which are published alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from publication import POLICY, Policy, Servers, versions

from megathunder.config.publish import PublishConfig
from megathunder.config.root import Config
from megathunder.learner.model.low_rank import merge
from megathunder.publish.publisher import Publisher
from megathunder.types import Publish, ServerAddress, WorkStats

RANK, ALPHA = 4, 8.0
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapted:
    """A frozen model, named tensors in full, and a random adapter of each linear layer; published alone."""

    def __init__(self, servers: Servers, folder: Path, base: dict[str, torch.Tensor], **settings: object) -> None:
        self.base, self.servers = base, servers
        self._random = torch.Generator().manual_seed(5)
        adapted = [name for name, w in base.items() if w.dim() == 2 and name.split(".")[-2] in LINEAR]
        self.factors = {
            name: (self._noise(RANK, base[name].shape[1]), torch.zeros(base[name].shape[0], RANK)) for name in adapted
        }
        config = Config(publish=PublishConfig(timeout_s=20.0, lora="adapter", **settings))
        learner = dataclasses.replace(config.learner, model=str(POLICY), lora_rank=RANK, lora_alpha=ALPHA)
        self.publisher = Publisher(
            dataclasses.replace(config, rollout=servers.config, learner=learner),
            export_weights=self.export,
            export_base=base.items,
            rank=0,
            device=torch.device("cpu"),
            host="127.0.0.1",
            folder=folder,
        )

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, (a, b) in self.factors.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            yield f"{stem}.lora_A.weight", a
            yield f"{stem}.lora_B.weight", b

    def step(self) -> None:
        for a, b in self.factors.values():
            a.add_(0.1 * self._noise(*a.shape))
            b.add_(0.01 * self._noise(*b.shape))

    @property
    def factor_bytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.factors.values())

    @property
    def base_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.base.values())

    def merged(self) -> dict[str, torch.Tensor]:
        return self.base | {n: merge(self.base[n], b, a, ALPHA / RANK) for n, (a, b) in self.factors.items()}

    def publish(self, addresses: tuple[ServerAddress, ...] | None = None) -> tuple[int, WorkStats]:
        version = next(versions)
        servers = self.servers.addresses if addresses is None else addresses
        return version, self.publisher.publish(Publish(item=0, version=version, servers=servers))

    def recomputed(self) -> Policy:
        """transformers with the merged weights."""
        policy = Policy(self.servers, Path())
        missing = policy.model.load_state_dict(self.merged(), strict=False)
        assert not missing.unexpected_keys
        return policy
