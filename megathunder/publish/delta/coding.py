"""One tensor's change as bytes: gap-coded positions and differences in ulps, entropy-coded by zstandard.

    old, new [N] unsigned words (the bits of bf16, fp16 or fp32)      positions i with old[i] != new[i], ascending
    gap_j = i_j - i_(j-1) - 1 = high * 2^k + low                      k so that high is about 16 to 32 on average
    change_j = (new - old) mod 2^bits, folded so that +1, -1, +2, -2 ... are 0, 1, 2, 3 ...

    stream     holds
    low        the k low bits of the gaps, near uniform: bit planes, not compressed
    high       the high parts, one byte plane after the other, each compressed
    change     16 bit: two changes a byte (15 escapes to a list of its own); 32 bit: byte planes; compressed

The compressor looks for no repetitions (its table of them is minimal): near-random symbols have none that pay.

Bits are compared, so -0 and +0 differ and a NaN equals itself. Where most elements change, the differences of all
elements are coded instead ("shifted"); where that does not pay either, the new bits ("dense"). Nothing loops over
elements. Called by `payload.py`. Refuses streams that do not have the length their description gives.
"""

from __future__ import annotations

import itertools
import threading
from enum import Enum

import msgspec
import numpy as np
import zstandard

SYMBOLS_ONLY = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)
SPARSE_BELOW = 0.3  # changed fraction; above it a difference for every element is shorter than positions
ESCAPE = 15
MAX_ELEMENTS = 1 << 32  # gaps are four bytes


class Coding(str, Enum):
    """How a tensor's new bits are written."""

    SAME = "same"
    SPARSE = "sparse"
    SHIFTED = "shifted"
    DENSE = "dense"
    LOW_RANK = "low_rank"  # factors of a merge with frozen weights (`engine/base.py`), `changed` of them


class EncodedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """What decoding needs beside the streams: `sizes` are their bytes, in the order of the module's table."""

    coding: Coding
    changed: int = 0
    low_bits: int = 0
    high_planes: int = 0
    escapes: int = 0
    sizes: tuple[int, ...] = ()


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded tensor: `words` to add at `positions` [n] (None: at every element), or new bits where `absolute`."""

    words: np.ndarray  # [n] unsigned, modulo its own width
    positions: np.ndarray | None = None  # [n] int64, ascending
    absolute: bool = False


def encode(old: np.ndarray, new: np.ndarray, positions: np.ndarray | None = None) -> tuple[EncodedTensor, list[bytes]]:
    """`old`, `new` [N], both uint16 or both uint32: the shortest of the codings and its streams. `positions`: where
    they differ, if that is known."""
    positions = np.flatnonzero(old != new) if positions is None else positions
    if not positions.size:
        return EncodedTensor(coding=Coding.SAME), []
    if positions.size <= SPARSE_BELOW * new.size and new.size < MAX_ELEMENTS:
        coded, streams = _sparse(positions, new[positions] - old[positions], new.size)
    else:
        streams, escapes = _values(_fold(new - old))
        coded = EncodedTensor(coding=Coding.SHIFTED, changed=positions.size, escapes=escapes, sizes=_sizes(streams))
    if sum(coded.sizes) >= new.nbytes:
        streams = [new.tobytes()]
        coded = EncodedTensor(coding=Coding.DENSE, changed=positions.size, sizes=_sizes(streams))
    return coded, streams


def decode(coded: EncodedTensor, data: memoryview, elements: int, word: np.dtype) -> Change:
    """The change of a tensor of `elements` words. Raises ValueError for streams that do not fit the description."""
    streams = _cut(data, coded.sizes)
    if coded.coding is Coding.LOW_RANK:
        raise ValueError("factors are no change of bits")
    if coded.coding is Coding.SAME:
        return Change(words=np.empty(0, word), positions=np.empty(0, np.int64))
    if coded.coding is Coding.DENSE:
        return Change(words=_exactly(np.frombuffer(streams[0], word), elements).copy(), absolute=True)
    if coded.coding is Coding.SHIFTED:
        return Change(words=_unfold(_folded(streams, elements, coded.escapes, word)))
    rows = coded.low_bits
    low = _low(streams[:rows], coded.changed)
    high = _join(streams[rows : rows + coded.high_planes], coded.changed, np.dtype(np.uint32))
    gaps = (high.astype(np.int64) << coded.low_bits) | low
    positions = np.cumsum(gaps + 1) - 1
    if positions.size and positions[-1] >= elements:
        raise ValueError(f"position {positions[-1]} in a tensor of {elements} elements")
    folded = _folded(streams[rows + coded.high_planes :], coded.changed, coded.escapes, word)
    return Change(words=_unfold(folded + word.type(1)), positions=positions)


def _sparse(positions: np.ndarray, difference: np.ndarray, elements: int) -> tuple[EncodedTensor, list[bytes]]:
    gaps = np.diff(positions, prepend=-1) - 1
    low_bits = max(0, int(np.log2(elements / positions.size)) - 4)
    low = [np.packbits(((gaps >> bit) & 1).astype(np.uint8)).tobytes() for bit in range(low_bits)]
    high = _planes((gaps >> low_bits).astype(np.uint32))
    values, escapes = _values(_fold(difference) - difference.dtype.type(1))
    streams = [*low, *high, *values]
    coded = EncodedTensor(
        coding=Coding.SPARSE,
        changed=positions.size,
        low_bits=low_bits,
        high_planes=len(high),
        escapes=escapes,
        sizes=_sizes(streams),
    )
    return coded, streams


def _low(streams: list[memoryview], count: int) -> np.ndarray | int:
    low: np.ndarray | int = 0
    for bit, stream in enumerate(streams):
        _exactly(stream, (count + 7) // 8)
        low |= np.unpackbits(np.frombuffer(stream, np.uint8), count=count).astype(np.int64) << bit
    return low


def _values(folded: np.ndarray) -> tuple[list[bytes], int]:
    """The streams of folded changes and how many of them escaped."""
    if folded.itemsize != 2:
        return _planes(folded), 0
    codes = np.minimum(folded, ESCAPE).astype(np.uint8)
    escaped = folded[codes == ESCAPE]
    if codes.size % 2:
        codes = np.append(codes, np.uint8(0))
    return [_compress((codes[0::2] | (codes[1::2] << 4)).tobytes()), *_planes(escaped)], escaped.size


def _folded(streams: list[memoryview], count: int, escapes: int, word: np.dtype) -> np.ndarray:
    """What `_values` was given."""
    if word.itemsize != 2:
        return _join(streams, count, word)
    pairs = np.frombuffer(_expand(streams[0], (count + 1) // 2), np.uint8)
    codes = np.empty(2 * pairs.size, np.uint8)
    codes[0::2], codes[1::2] = pairs & 15, pairs >> 4
    folded = codes[:count].astype(word)
    folded[folded == ESCAPE] = _join(streams[1:], escapes, word)
    return folded


def _fold(difference: np.ndarray) -> np.ndarray:
    """0, -1, +1, -2, +2 ... -> 0, 1, 2, 3, 4 ..., modulo the word."""
    signed = difference.view(np.dtype(f"i{difference.itemsize}"))
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _unfold(folded: np.ndarray) -> np.ndarray:
    return (folded >> 1) ^ (np.zeros(1, folded.dtype) - (folded & 1))


def _planes(words: np.ndarray) -> list[bytes]:
    """Byte planes, least significant first, each compressed; planes above the last that holds anything are left out."""
    octets = words.view(np.uint8).reshape(-1, words.itemsize)
    used = (int(words.max()).bit_length() + 7) // 8 if words.size else 0
    return [_compress(np.ascontiguousarray(octets[:, plane]).tobytes()) for plane in range(used)]


def _join(streams: list[memoryview], count: int, word: np.dtype) -> np.ndarray:
    octets = np.zeros((count, word.itemsize), np.uint8)
    for plane, stream in enumerate(streams):
        octets[:, plane] = np.frombuffer(_expand(stream, count), np.uint8)
    return octets.reshape(-1).view(word)


class _Coder(threading.local):
    """A compressor is of one thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=SYMBOLS_ONLY)
        self.decompressor = zstandard.ZstdDecompressor()


_coder = _Coder()


def _compress(data: bytes) -> bytes:
    return _coder.compressor.compress(data)


def _expand(data: memoryview, size: int) -> bytes:
    if zstandard.frame_content_size(data) != size:
        raise ValueError(f"a stream of {zstandard.frame_content_size(data)} bytes where {size} were described")
    return _coder.decompressor.decompress(data, max_output_size=size)


def _cut(data: memoryview, sizes: tuple[int, ...]) -> list[memoryview]:
    ends = np.cumsum((0, *sizes)).tolist()
    _exactly(data, ends[-1])
    return [data[start:end] for start, end in itertools.pairwise(ends)]


def _exactly(data: np.ndarray | memoryview, size: int) -> np.ndarray | memoryview:
    if len(data) != size:
        raise ValueError(f"{len(data)} where {size} were described")
    return data


def _sizes(streams: list[bytes]) -> tuple[int, ...]:
    return tuple(map(len, streams))
