"""Adapters alone: the servers keep the frozen weights and merge what arrives, to the learner's own bits.

    first publication   the leader keeps a host copy of the base, in the type of the servers
    a server anew       keep: "is this your base?"; one that was started from the same folder says yes, at once.
                        Any other is sent the base in full first
    every publication   merge: A and B of each adapted tensor; the server has no version meanwhile
                        the leader merges too -> checksum -> adopt: the server says that it holds the same

A server that has lost its base refuses the factors and is begun with anew. Called by `publisher.py`. Refuses a base
that the servers' type would round: what they merge would not be what the learner merges.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from megathunder.errors import ConfigError, InfrastructureFailure
from megathunder.learner.model.low_rank import merge
from megathunder.publish.acknowledge import RefusedPayload, acknowledge, deliver
from megathunder.publish.bits import as_uint, dtype_name, published_dtype
from megathunder.publish.checksum import MASK, tensor_checksum
from megathunder.publish.delta.coding import Coding, EncodedTensor
from megathunder.publish.envelope import Inline
from megathunder.publish.payload import NO_VERSION, Action, Header, Piece, seal
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.base import Transport, Weights
from megathunder.publish.transports.carriers import Carrier
from megathunder.types import ServerAddress

log = logging.getLogger(__name__)
PREFIX, SIDES = "base_model.model.", {".lora_A.weight": 0, ".lora_B.weight": 1}


class AdapterTransport:
    """`full` sends the base where it is lacking, `carrier` brings the factors; `scale` is that of the adapters."""

    def __init__(self, full: Transport, carrier: Carrier, *, scale: float) -> None:
        self._full, self._carrier, self._scale = full, carrier, scale
        self._base: dict[str, Tensor] = {}
        self._checksums: dict[str, int] = {}
        self._based: set[ServerAddress] = set()

    def hold_base(self, weights: Weights, dtype: torch.dtype | None) -> None:
        """Keep the frozen `weights` as servers that compute in `dtype` hold them. Exhausts `weights`, then raises
        ConfigError for a base that `dtype` would round."""
        rounded = []
        for name, tensor in weights:
            kept = tensor.detach().to("cpu", published_dtype(name, dtype) or tensor.dtype, copy=True).contiguous()
            if not torch.equal(kept.to(tensor.dtype), tensor.cpu()):
                rounded.append(name)
            self._base[name] = kept
            self._checksums[name] = tensor_checksum(name, kept)
        if rounded:
            raise ConfigError(
                f"publish.lora = 'adapter': {len(rounded)} frozen tensors ({rounded[0]}, ...) are not exact in {dtype}",
                expected="a base that servers hold without rounding it, since they merge adapters into it",
                remedy="set publish.lora = 'merged', or rollout.dtype to the learner's",
            )

    def send(self, round: PublishSession, servers: tuple[ServerAddress, ...], version: int, weights: Weights) -> int:
        """See `Transport.send`; `weights` are the adapters' matrices under PEFT's names. Returns the most that one
        server was sent."""
        factors = paired(weights)
        message = self._message(factors)
        data = seal(message[0], message[1])
        keep = self._keep(message[0])
        sent = self._begin([s for s in servers if s not in self._based], round, keep)
        refused: set[ServerAddress] = set()

        async def one(server: ServerAddress) -> None:
            try:
                await self._carrier.carry(round, server, data)
            except RefusedPayload as refusal:
                if refusal.held.changed:
                    raise
                log.warning("%s; it is asked for its base", refusal)
                refused.add(server)

        merging = round.start(one, servers)
        header = self._merged(message[0], factors, version)
        merging.result()
        if refused:
            sent = max(sent, self._begin(refused, round, keep))
            again, refused = tuple(refused), set()
            round.each(one, again)
            round.each(_fail, refused)
        adoption = seal(header)
        round.each(lambda server: acknowledge(round, server, adoption, header), servers)
        self._based = {known for known in self._based if known.name not in {s.name for s in servers}}
        self._based |= set(round.live(servers))
        return sent + len(data)

    def _begin(self, servers: Iterable[ServerAddress], round: PublishSession, keep: bytes) -> int:
        """Have `servers` keep the base; the bytes that those without it had to be sent."""
        lacking: list[ServerAddress] = []

        async def ask(server: ServerAddress) -> None:
            try:
                await deliver(round, server, Inline(data=keep))
            except RefusedPayload as refusal:
                if server in lacking:
                    raise
                log.warning("%s; it gets the frozen weights", refusal)
                lacking.append(server)

        round.each(ask, servers)
        lack = tuple(lacking)
        if not round.live(lack):
            return 0
        sent = self._full.send(round, lack, NO_VERSION, self._base.items())
        round.each(ask, lack)
        return sent

    def _message(self, factors: dict[str, tuple[Tensor, Tensor]]) -> tuple[Header, list[bytes]]:
        """The factors of every adapted tensor, and that the others are those of the base."""
        if unknown := factors.keys() - self._base.keys():
            raise ValueError(f"adapters of {min(unknown)}, which is no tensor of the base")
        pieces, streams = [], []
        for name, tensor in self._base.items():
            coded = None
            if name in factors:
                a, b = factors[name]
                streams.append(as_uint(a).tobytes() + as_uint(b).tobytes())
                coded = EncodedTensor(coding=Coding.LOW_RANK, changed=a.shape[0], sizes=(len(streams[-1]),))
            pieces.append(Piece(name=name, dtype=dtype_name(tensor), shape=tuple(tensor.shape), coded=coded))
        header = Header(
            action=Action.MERGE,
            pieces=tuple(pieces),
            base_checksum=sum(self._checksums.values()) & MASK,
            scale=self._scale,
            factors=dtype_name(next(iter(factors.values()))[0]),
        )
        return header, streams

    def _keep(self, header: Header) -> bytes:
        """The question whether a server's weights are the base, and the order to keep them."""
        marked = EncodedTensor(coding=Coding.LOW_RANK)
        pieces = (
            Piece(name=p.name, dtype=p.dtype, shape=p.shape, coded=marked if p.coded else None) for p in header.pieces
        )
        base = header.base_checksum
        return seal(Header(action=Action.KEEP, pieces=tuple(pieces), base_checksum=base, checksum=base))

    def _merged(self, header: Header, factors: dict[str, tuple[Tensor, Tensor]], version: int) -> Header:
        """What a server that has merged the factors must hold."""
        total = 0
        for name, tensor in self._base.items():
            if name in factors:
                a, b = factors[name]
                total += tensor_checksum(name, merge(tensor, b, a, self._scale).to(tensor.dtype))
            else:
                total += self._checksums[name]
        pieces = tuple(Piece(name=p.name, dtype=p.dtype, shape=p.shape) for p in header.pieces)
        return Header(action=Action.ADOPT, pieces=pieces, target=version, checksum=total & MASK)


def paired(weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    """Tensor of the model -> A and B on the host."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights:
        side = next(side for side in SIDES if name.endswith(side))
        part = name.removeprefix(PREFIX).removesuffix(side) + ".weight"
        found.setdefault(part, {})[SIDES[side]] = tensor.detach().to("cpu", copy=True).contiguous()
    return {part: (sides[0], sides[1]) for part, sides in found.items()}


async def _fail(server: ServerAddress) -> None:
    raise InfrastructureFailure(f"{server.name} has the base and refuses what sits on it")
