"""Inside an engine adapters are merged into the weights it keeps, on every shard, and nothing else is merged at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from test_places import Engine, answer, checksum, pieces, shard, weights

from megathunder.learner.model.low_rank import merge
from megathunder.publish.bits import as_uint
from megathunder.publish.delta.coding import Coding, EncodedTensor
from megathunder.publish.engine.base import Base
from megathunder.publish.engine.fused_layout import FusedLayout
from megathunder.publish.payload import Action, Header, Piece

RANK, SCALE = 3, 0.7


def adapters(base: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: (
            torch.randn(RANK, w.shape[1], generator=generator),
            torch.randn(w.shape[0], RANK, generator=generator),
        )
        for name, w in base.items()
        if name.endswith("_proj.weight")
    }


def message(base: dict[str, Tensor], factors: dict[str, tuple[Tensor, Tensor]]) -> tuple[Header, list[bytes]]:
    described, streams = [], []
    for piece in pieces(base):
        coded = None
        if piece.name in factors:
            streams.append(b"".join(as_uint(m).tobytes() for m in factors[piece.name]))
            coded = EncodedTensor(coding=Coding.LOW_RANK, changed=RANK, sizes=(len(streams[-1]),))
        described.append(Piece(name=piece.name, dtype=piece.dtype, shape=piece.shape, coded=coded))
    header = Header(
        action=Action.MERGE,
        pieces=tuple(described),
        base_checksum=checksum(base),
        scale=SCALE,
        factors="float32",
    )
    return header, streams


def keep(header: Header) -> Header:
    described = (
        Piece(name=p.name, dtype=p.dtype, shape=p.shape, coded=p.coded and EncodedTensor(coding=Coding.LOW_RANK))
        for p in header.pieces
    )
    base = header.base_checksum
    return Header(action=Action.KEEP, pieces=tuple(described), base_checksum=base, checksum=base)


def merged(base: dict[str, Tensor], factors: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return base | {name: merge(base[name], b, a, SCALE) for name, (a, b) in factors.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_rank_merges_its_part_to_the_bits_of_the_whole(ranks: int, kv_heads: int) -> None:
    base = weights(kv_heads)
    header, streams = message(base, adapters(base))
    new = merged(base, adapters(base))
    for rank in range(ranks):
        held, expected = shard(base, rank, ranks), shard(new, rank, ranks)
        places = FusedLayout(held, header.pieces, rank=rank, ranks=ranks)
        kept, data = Base.keep(keep(header), places), iter(streams)
        for piece in header.pieces:
            if piece.coded is not None:
                kept.merge(piece, memoryview(next(data)), places[piece.name], header)
        assert all(torch.equal(held[name], expected[name]) for name in held)


def test_merged_weights_are_adopted_under_the_learners_checksum_again_and_again() -> None:
    base = weights()
    engine = Engine(shard(base, 0, 1))
    header, _ = message(base, adapters(base))
    assert answer(engine, keep(header)).error == ""
    for version, factor in ((1, 1.0), (2, -3.0)):
        factors = {name: (a, b * factor) for name, (a, b) in adapters(base).items()}
        held = answer(engine, *message(base, factors))
        assert (held.error, held.version, held.changed) == ("", -1, True), "no version until it is adopted"
        assert answer(engine, keep(header)).error == "", "the base is still kept"
        total = checksum(merged(base, factors))
        held = answer(engine, Header(action=Action.ADOPT, pieces=pieces(base), target=version, checksum=total))
        assert (held.error, held.version) == ("", version)


def test_weights_other_than_the_base_are_not_kept_and_nothing_is_merged_into_them() -> None:
    base, other = weights(), weights(seed=1)
    engine = Engine(shard(other, 0, 1))
    header, streams = message(base, adapters(base))
    assert "none is kept" in answer(engine, header, streams).error
    assert "the frozen base" in answer(engine, keep(header)).error
    mine, _ = message(other, adapters(other))
    assert answer(engine, keep(mine)).error == ""
    held = answer(engine, header, streams)
    assert "the one kept has" in held.error and not held.changed
    assert all(torch.equal(engine.held[name].data, w) for name, w in shard(other, 0, 1).items())


@pytest.mark.parametrize("change", [{"changed": 0}, {"changed": RANK + 1}, {"sizes": (8,)}, {"sizes": ()}])
def test_factors_of_another_size_are_refused_before_anything_is_written(change: dict[str, object]) -> None:
    base = weights()
    engine = Engine(shard(base, 0, 1))
    header, streams = message(base, adapters(base))
    answer(engine, keep(header))
    coded = {"coding": Coding.LOW_RANK, "changed": RANK, "sizes": (len(streams[0]),)} | change
    first = next(i for i, p in enumerate(header.pieces) if p.coded)
    described = list(header.pieces)
    described[first] = Piece(
        **{f: getattr(described[first], f) for f in ("name", "dtype", "shape")}, coded=EncodedTensor(**coded)
    )
    size = sum(coded["sizes"])
    resized = [streams[0][:size].ljust(size, b"\0"), *streams[1:]]
    wrong = Header(
        action=Action.MERGE, pieces=tuple(described), base_checksum=checksum(base), scale=SCALE, factors="float32"
    )
    held = answer(engine, wrong, resized)
    assert "factors of rank" in held.error and not held.changed
    assert all(torch.equal(engine.held[name].data, w) for name, w in shard(base, 0, 1).items())


@pytest.mark.parametrize("action", [Action.FILL, Action.APPLY, Action.ADOPT])
def test_factors_belong_to_a_merge(action: Action) -> None:
    base = weights()
    engine = Engine(shard(base, 0, 1))
    header, streams = message(base, adapters(base))
    answer(engine, keep(header))
    held = answer(engine, Header(action=action, pieces=header.pieces, target=3, base_checksum=0), streams)
    assert held.error and not held.changed
