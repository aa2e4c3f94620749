"""A change decodes to exactly the bits that were there, is as short as entropy allows, and refuses damage."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.coding import Coding, EncodedTensor, decode, encode
from megathunder.publish.delta.snapshot import Encoded, Snapshot
from megathunder.publish.payload import Action, Header, PayloadError, Piece, open_payload, seal

WORDS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


def decoded(old: np.ndarray, new: np.ndarray) -> tuple[Coding, np.ndarray]:
    """What a receiver that holds `old` makes of the change to `new`."""
    coded, streams = encode(old, new)
    change = decode(coded, memoryview(b"".join(streams)), old.size, old.dtype)
    kind = torch.bfloat16 if old.itemsize == 2 else torch.float32
    held = torch.from_numpy(old.view(f"i{old.itemsize}").copy()).view(kind)
    apply_change(held, change)
    return coded.coding, held.view(torch.int16 if old.itemsize == 2 else torch.int32).numpy().view(old.dtype)


def changed(rng: np.random.Generator, size: int, fraction: float, word: type, widest: int) -> tuple[np.ndarray, ...]:
    old = rng.integers(0, np.iinfo(word).max, size, dtype=word)
    new = old.copy()
    chosen = np.flatnonzero(rng.random(size) < fraction)
    new[chosen] += rng.integers(1, widest + 1, chosen.size).astype(word) * rng.choice(
        [1, np.iinfo(word).max], chosen.size
    ).astype(word)
    return old, new


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 3000),
    fraction=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.29, 0.31, 0.7, 1.0]),
    word=st.sampled_from([np.uint16, np.uint32]),
    widest=st.sampled_from([1, 7, 8, 20, 40000]),
)
def test_decoding_gives_the_new_bits(seed: int, size: int, fraction: float, word: type, widest: int) -> None:
    old, new = changed(np.random.default_rng(seed), size, fraction, word, widest)
    assert np.array_equal(decoded(old, new)[1], new)


@pytest.mark.parametrize("word", [np.uint16, np.uint32])
def test_every_word_to_every_other_extreme(word: type) -> None:
    top = np.iinfo(word).max
    extremes = np.array([0, 1, top // 2, top // 2 + 1, top - 1, top], word)
    old, new = (m.reshape(-1).copy() for m in np.meshgrid(extremes, extremes))
    assert np.array_equal(decoded(old, new)[1], new)


def test_each_coding_is_chosen_where_it_is_the_shortest() -> None:
    rng = np.random.default_rng(0)
    same, few, most = (changed(rng, 20000, fraction, np.uint16, 2) for fraction in (0.0, 0.02, 0.9))
    noise = rng.integers(0, 1 << 16, 20000, dtype=np.uint16), rng.integers(0, 1 << 16, 20000, dtype=np.uint16)
    found = [decoded(*pair)[0] for pair in (same, few, most, noise)]
    assert found == [Coding.SAME, Coding.SPARSE, Coding.SHIFTED, Coding.DENSE]


def test_bits_are_compared_and_not_values() -> None:
    old = torch.tensor([0.0, -0.0, float("nan"), 1.0], dtype=torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert encode(old, old.copy())[0].changed == 0, "a NaN equals itself"
    new = old.copy()
    new[0] = old[1]
    assert encode(old, new)[0].changed == 1, "zeros of either sign differ"
    assert np.array_equal(decoded(old, new)[1], new)


@pytest.mark.parametrize("fraction", [0.2, 0.1, 0.044, 0.01, 0.001])
def test_size_is_within_5_percent_of_the_entropy_of_independent_positions_and_values(fraction: float) -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, 2_000_000, dtype=np.uint16)
    new = old.copy()
    chosen = np.flatnonzero(rng.random(old.size) < fraction)
    values = rng.choice(np.array([1, 65535, 2, 65534], np.uint16), chosen.size, p=[0.47, 0.47, 0.03, 0.03])
    new[chosen] += values
    share = chosen.size / old.size
    positions = -old.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8
    counts = np.unique(values, return_counts=True)[1] / chosen.size
    bound = positions - chosen.size * (counts * np.log2(counts)).sum() / 8
    assert sum(encode(old, new)[0].sizes) <= 1.05 * bound


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(40, 50, generator=generator).to(torch.bfloat16),
        "norm.weight": torch.randn(50, generator=generator).to(torch.bfloat16),
        "bias": torch.randn(7, generator=generator),
    }


def step(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: (t.float() * (1 + 0.004 * (torch.arange(t.numel()).view(t.shape) % 9 == 0))).to(t.dtype)
        for name, t in tensors.items()
    }


def snapshot(tensors: dict[str, torch.Tensor]) -> Snapshot:
    found = Snapshot()
    for _ in found.take(3, tensors.items()):
        pass
    return found


def test_encoding_leaves_the_snapshot_and_advancing_makes_it_the_new_weights() -> None:
    old, new = weights(0), step(weights(0))
    held = snapshot(old)
    encoded = held.encode(4, new.items())
    assert held.version == 3 and all(torch.equal(held.tensors[name], old[name]) for name in old)
    held.advance(encoded)
    assert held.version == 4 and all(torch.equal(held.tensors[name], new[name]) for name in new)
    assert held.checksum == snapshot(new).checksum


def test_any_number_of_threads_gives_the_same_payload() -> None:
    found = [snapshot(weights(0)).encode(4, step(weights(0)).items()).data]
    for threads in (2, 5):
        held = Snapshot(threads=threads)
        for _ in held.take(3, weights(0).items()):
            pass
        found.append(held.encode(4, step(weights(0)).items()).data)
    assert len(set(found)) == 1


def sealed() -> Encoded:
    return snapshot(weights(0)).encode(4, step(weights(0)).items())


def test_the_header_says_from_where_to_where() -> None:
    header = open_payload(memoryview(sealed().data)).header
    assert (header.action, header.base, header.target) == (Action.APPLY, 3, 4)
    assert header.base_checksum == snapshot(weights(0)).checksum
    assert header.checksum == snapshot(step(weights(0))).checksum


def test_any_damaged_byte_and_any_lost_byte_is_refused() -> None:
    data = sealed().data
    for position in range(len(data)):
        with pytest.raises(PayloadError):
            open_payload(memoryview(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]))
        with pytest.raises(PayloadError):
            open_payload(memoryview(data[:position]))
    with pytest.raises(PayloadError):
        open_payload(memoryview(data + b"\0"))


@pytest.mark.parametrize(
    "change",
    [
        {"changed": 2001},
        {"changed": -1},
        {"escapes": 1 << 40},
        {"low_bits": 33},
        {"high_planes": 5},
        {"sizes": (-1, 1)},
    ],
)
def test_counts_that_a_tensor_cannot_have_are_refused_before_memory_is_taken(change: dict[str, object]) -> None:
    coded = msgspec.structs.replace(EncodedTensor(coding=Coding.SPARSE, changed=1, low_bits=1, high_planes=1), **change)
    piece = Piece(name="a.weight", dtype="bfloat16", shape=(40, 50), coded=coded)
    with pytest.raises(PayloadError, match="a.weight"):
        open_payload(memoryview(seal(Header(action=Action.APPLY, pieces=(piece,)))))


def test_other_names_or_shapes_than_the_snapshots_are_refused() -> None:
    held = snapshot(weights(0))
    fewer = dict(list(weights(0).items())[:2])
    with pytest.raises(ValueError, match="2 tensors"):
        held.encode(4, fewer.items())
    with pytest.raises(ValueError, match="bias"):
        held.encode(4, (weights(0) | {"bias": torch.zeros(8)}).items())


@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 10), (0, 12)), ((10, 20), (0, 12)), ((0, 20), (4, 8)), ((5, 15), (8, 12))]
)
@pytest.mark.parametrize("fraction", [0.05, 0.6, 1.0])
def test_a_shard_takes_its_part_of_a_change(rows: tuple[int, int], columns: tuple[int, int], fraction: float) -> None:
    old, new = changed(np.random.default_rng(3), 240, fraction, np.uint16, 3 if fraction < 1 else 40000)
    coded, streams = encode(old, new)
    change = decode(coded, memoryview(b"".join(streams)), old.size, old.dtype)
    window = np.s_[rows[0] : rows[1], columns[0] : columns[1]]
    part = torch.from_numpy(old.view(np.int16).reshape(20, 12)[window].copy()).view(torch.bfloat16)
    apply_change(part, change, (20, 12), row=rows[0], column=columns[0])
    assert np.array_equal(part.view(torch.int16).numpy().view(np.uint16), new.reshape(20, 12)[window])


@pytest.mark.parametrize("fraction", [0.05, 0.6, 1.0])
def test_a_part_of_wider_rows_takes_a_change_and_the_rest_stays(fraction: float) -> None:
    old, new = changed(np.random.default_rng(4), 240, fraction, np.uint16, 3 if fraction < 1 else 40000)
    coded, streams = encode(old, new)
    wide = torch.zeros(24, 16, dtype=torch.bfloat16)
    part = wide[:20, :12]
    part.view(torch.int16).copy_(torch.from_numpy(old.view(np.int16).reshape(20, 12)))
    apply_change(part, decode(coded, memoryview(b"".join(streams)), old.size, old.dtype), (20, 12))
    assert np.array_equal(part.contiguous().view(torch.int16).numpy().view(np.uint16), new.reshape(20, 12))
    assert not wide[20:].any() and not wide[:, 12:].any()
