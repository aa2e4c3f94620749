"""Two layouts of the same weights have the same checksum; any other weights do not."""

from __future__ import annotations

import pytest
import torch

from megathunder.publish import checksum as module
from megathunder.publish.checksum import MASK, changed_checksum, piece_checksum, tensor_checksum


def tensor(rows: int = 24, columns: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [16, 13])
def test_shards_of_rows_sum_to_the_whole(dtype: torch.dtype, columns: int) -> None:
    whole = tensor(columns=columns, dtype=dtype)
    parts = [piece_checksum("w", whole.shape, whole[r : r + 8], row=r) for r in (16, 0, 8)]
    assert sum(parts) & MASK == tensor_checksum("w", whole)


def test_shards_of_columns_sum_to_the_whole() -> None:
    whole = tensor()
    parts = [piece_checksum("w", whole.shape, whole[:, c : c + 8], column=c) for c in (8, 0)]
    assert sum(parts) & MASK == tensor_checksum("w", whole)


def test_columns_that_split_a_word_are_refused() -> None:
    whole = tensor()
    with pytest.raises(ValueError, match="whole 8-byte words"):
        piece_checksum("w", whole.shape, whole[:, :6])


def test_rows_inside_a_fused_parameter_count_as_the_tensor_itself() -> None:
    whole = tensor()
    fused = torch.cat([torch.zeros(3, 16, dtype=whole.dtype), whole])
    assert tensor_checksum("w", fused[3:]) == tensor_checksum("w", whole)


def test_the_sum_does_not_depend_on_how_it_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, wide = tensor(), torch.arange(1000.0)
    before = tensor_checksum("w", whole), tensor_checksum("v", wide), piece_checksum("w", (24, 32), whole, column=16)
    for words in (1, 3, 4, 7):
        monkeypatch.setattr(module, "CHUNK_WORDS", words)
        after = tensor_checksum("w", whole), tensor_checksum("v", wide), piece_checksum("w", (24, 32), whole, column=16)
        assert after == before


def test_one_bit_a_swap_a_name_a_shape_and_a_type_change_it() -> None:
    whole = tensor(dtype=torch.float32)
    bit, swapped = whole.clone(), whole.clone()
    bit.view(torch.int32)[5, 5] ^= 1
    swapped[[0, 1]] = swapped[[1, 0]]
    zeros = torch.zeros(4, 8), -torch.zeros(4, 8)
    found = [
        tensor_checksum("w", whole),
        tensor_checksum("w", bit),
        tensor_checksum("w", swapped),
        tensor_checksum("v", whole),
        tensor_checksum("w", whole.view(12, 32)),
        tensor_checksum("w", zeros[0]),
        tensor_checksum("w", zeros[1]),
        tensor_checksum("w", zeros[0].to(torch.bfloat16)),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(24, 16), (9, 4, 8), (64,), (7, 13)])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_words_that_changed_take_the_checksum_along(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    old = torch.randn(shape, generator=generator).to(dtype)
    new = old.clone()
    positions = torch.randperm(old.numel(), generator=generator)[:count].sort().values
    new.view(-1)[positions] *= -1
    moved = changed_checksum("w", shape, old, new, positions.numpy())
    if shape == (7, 13):
        assert moved is None, "rows that are not whole words"
    else:
        assert (tensor_checksum("w", old) + moved) & MASK == tensor_checksum("w", new)
