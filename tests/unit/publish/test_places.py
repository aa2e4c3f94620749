"""Shards of an engine together hold each tensor once, take their part of a change, and anything unknown is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megathunder.publish.checksum import MASK, piece_checksum, tensor_checksum
from megathunder.publish.delta.snapshot import Snapshot
from megathunder.publish.engine import loader
from megathunder.publish.engine.fused_layout import FusedLayout
from megathunder.publish.envelope import ACKNOWLEDGEMENT, Envelope, Inline, ServerWeights, from_parameter
from megathunder.publish.payload import Action, Header, PayloadError, Piece, seal

HIDDEN, HEAD, HEADS, INNER, EXPERTS, VOCABULARY = 16, 8, 4, 24, 3, 20


def weights(kv_heads: int = 2, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "l.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "l.self_attn.k_proj.weight": (kv_heads * HEAD, HIDDEN),
        "l.self_attn.v_proj.weight": (kv_heads * HEAD, HIDDEN),
        "l.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "l.mlp.gate_proj.weight": (INNER, HIDDEN),
        "l.mlp.up_proj.weight": (INNER, HIDDEN),
        "l.mlp.down_proj.weight": (HIDDEN, INNER),
        "l.norm.weight": (HIDDEN,),
    }
    for expert in range(EXPERTS):
        shapes[f"l.mlp.experts.{expert}.gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"l.mlp.experts.{expert}.up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"l.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shard(w: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """What rank `rank` of an engine holds, written naively."""

    def rows(name: str) -> Tensor:
        return w[name].chunk(ranks, 0)[rank]

    def columns(name: str) -> Tensor:
        return w[name].chunk(ranks, 1)[rank]

    def heads(name: str) -> Tensor:
        count = w[name].shape[0] // HEAD
        if count >= ranks:
            return rows(name)
        first = rank * count // ranks
        return w[name][first * HEAD : (first + 1) * HEAD]

    padded = torch.cat([w["model.embed_tokens.weight"], torch.zeros(12, HIDDEN)])
    experts = [f"l.mlp.experts.{e}" for e in range(EXPERTS)]
    qkv = [rows("l.self_attn.q_proj.weight"), heads("l.self_attn.k_proj.weight"), heads("l.self_attn.v_proj.weight")]
    stacked = [torch.cat([rows(f"{e}.gate_proj.weight"), rows(f"{e}.up_proj.weight")]) for e in experts]
    found = {
        "model.embed_tokens.weight": padded.chunk(ranks, 0)[rank],
        "l.self_attn.qkv_proj.weight": torch.cat(qkv),
        "l.self_attn.o_proj.weight": columns("l.self_attn.o_proj.weight"),
        "l.mlp.gate_up_proj.weight": torch.cat([rows("l.mlp.gate_proj.weight"), rows("l.mlp.up_proj.weight")]),
        "l.mlp.down_proj.weight": columns("l.mlp.down_proj.weight"),
        "l.norm.weight": w["l.norm.weight"],
        "l.mlp.experts.w13_weight": torch.stack(stacked),
        "l.mlp.experts.w2_weight": torch.stack([columns(f"{e}.down_proj.weight") for e in experts]),
    }
    return {name: tensor.contiguous().clone() for name, tensor in found.items()}


def pieces(w: dict[str, Tensor]) -> tuple[Piece, ...]:
    return tuple(Piece(name=name, dtype="float32", shape=tuple(t.shape)) for name, t in w.items())


def checksum(w: dict[str, Tensor]) -> int:
    return sum(tensor_checksum(name, tensor) for name, tensor in w.items()) & MASK


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shards_of_every_rank_sum_to_the_checksum_of_the_whole(ranks: int, kv_heads: int) -> None:
    w, total = weights(kv_heads), 0
    for rank in range(ranks):
        places = FusedLayout(shard(w, rank, ranks), pieces(w), rank=rank, ranks=ranks)
        places.check_complete()
        for piece in pieces(w):
            place = places[piece.name]
            if place.counts and place.view.numel():
                total += piece_checksum(piece.name, piece.shape, place.view, row=place.row, column=place.column)
    assert total & MASK == checksum(w)


class Engine(nn.Module):
    """A model with the engine's parameters of one rank."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(tensor) for name, tensor in parameters.items()}

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.held.items())

    def parameters(self) -> object:
        return iter(self.held.values())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("fraction", [0.1, 0.7])
def test_every_rank_takes_its_part_of_a_change(ranks: int, kv_heads: int, fraction: float) -> None:
    old, noise = weights(kv_heads), weights(kv_heads, seed=1)
    new = {n: torch.where(noise[n].abs() < noise[n].abs().quantile(fraction), t * 1.001, t) for n, t in old.items()}
    snapshot = Snapshot()
    for _ in snapshot.take(1, old.items()):
        pass
    opened = loader.open_payload(memoryview(snapshot.encode(2, new.items()).data))
    for rank in range(ranks):
        held, expected = shard(old, rank, ranks), shard(new, rank, ranks)
        places = FusedLayout(held, opened.header.pieces, rank=rank, ranks=ranks)
        for piece, data in opened.parts():
            loader._put(
                piece,
                loader.decode(piece.coded, data, piece.elements, loader.uint_dtype("float32")),
                places[piece.name],
            )
        assert all(torch.equal(held[name], expected[name]) for name in held)


def answer(engine: Engine, header: Header, streams: list[bytes] = []) -> ServerWeights:  # noqa: B006 (read only)
    envelope = Envelope(serial=5, payload=Inline(data=seal(header, streams)), timeout_s=1.0)
    data = torch.frombuffer(bytearray(loader.msgspec.msgpack.encode(envelope)), dtype=torch.uint8)
    loader.load(engine, [(loader.ENVELOPE, data)])
    return from_parameter(engine.get_weights_by_name(ACKNOWLEDGEMENT))


def test_weights_other_than_those_described_are_not_adopted_and_versions_only_grow() -> None:
    w = weights()
    engine = Engine(shard(w, 0, 1))
    header = Header(action=Action.ADOPT, pieces=pieces(w), target=4, checksum=checksum(w))
    assert "checksum" in answer(engine, Header(action=Action.ADOPT, pieces=pieces(w), target=4, checksum=1)).error
    held = answer(engine, header)
    assert (held.version, held.checksum, held.error) == (4, checksum(w), "")
    lower = answer(engine, Header(action=Action.ADOPT, pieces=pieces(w), target=3, checksum=checksum(w)))
    assert lower.version == 4 and "only grow" in lower.error
    engine.held["l.norm.weight"].data[3] += 1
    assert answer(engine, header).version == -1, "an engine whose weights were touched loses its version"


def test_what_has_no_place_is_refused_and_so_is_a_parameter_that_nothing_describes() -> None:
    w = weights()
    parameters = shard(w, 0, 1)
    with pytest.raises(PayloadError, match="no parameter l.other.weight"):
        FusedLayout(parameters, (*pieces(w), Piece(name="l.other.weight", dtype="float32", shape=(3,))))
    with pytest.raises(PayloadError, match="arrives as bfloat16"):
        FusedLayout(parameters, (Piece(name="l.norm.weight", dtype="bfloat16", shape=(HIDDEN,)),))
    with pytest.raises(PayloadError, match="this engine's part"):
        FusedLayout(parameters, (Piece(name="l.norm.weight", dtype="float32", shape=(HIDDEN + 1,)),))
    with pytest.raises(PayloadError, match="without l.self_attn.v_proj.weight"):
        FusedLayout(parameters, pieces(w)[:3])
    with pytest.raises(PayloadError, match="holds 3 experts"):
        FusedLayout(
            parameters, (Piece(name="l.mlp.experts.3.down_proj.weight", dtype="float32", shape=(HIDDEN, INNER)),)
        )
    with pytest.raises(PayloadError, match="l.norm.weight has 16 elements, of which the message describes 0"):
        FusedLayout(parameters, tuple(p for p in pieces(w) if p.name != "l.norm.weight")).check_complete()


def test_two_learners_that_give_one_number_to_different_weights_are_told_apart() -> None:
    w, other = weights(), weights(seed=1)
    engine = Engine(shard(w, 0, 1))
    assert answer(engine, Header(action=Action.ADOPT, pieces=pieces(w), target=4, checksum=checksum(w))).error == ""
    for name, tensor in shard(other, 0, 1).items():
        engine.held[name].data.copy_(tensor)
    refused = answer(engine, Header(action=Action.ADOPT, pieces=pieces(w), target=4, checksum=checksum(other)))
    assert "second learner" in refused.error
    assert answer(engine, Header(action=Action.ADOPT, pieces=pieces(w), target=5, checksum=checksum(other))).error == ""
