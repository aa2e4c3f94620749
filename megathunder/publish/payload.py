"""What travels to our loader inside a server: a checked header, then the bytes of the tensors.

    offset  bytes  holds
    0       4      b"MTW1"
    4       4      length of the header, little endian
    8       16     blake2b of the header
    24      -      header: `Header` as MessagePack, compressed
    -       -      body: the streams of the pieces, one after the other

    action   what the server does                                            its base
    adopt    nothing; it says whether its weights are those described        any
    fill     writes the (dense) pieces; its weights have no version now      any
    apply    adds the differences, then adopts                               must be (base, base_checksum)
    keep     copies the weights that adapters will sit on                    any; the weights must be the base
    merge    writes base + adapter; its weights have no version now          must have kept base_checksum

`open_payload` raises PayloadError for a message that is truncated, too long, altered or of another format, so that a
server refuses it before anything is changed. Called by publish/ on both sides.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from enum import Enum

import msgspec
import zstandard

from megathunder.errors import MegathunderError
from megathunder.publish.delta.coding import Coding, EncodedTensor

NO_VERSION = -1
MAGIC = b"MTW1"
PREFIX = struct.Struct("<4sI16s")
MAX_HEADER_BYTES = 1 << 28


class PayloadError(MegathunderError):
    """A message to a server that must not be acted on."""


class Action(str, Enum):
    """See the module's table."""

    ADOPT = "adopt"
    FILL = "fill"
    APPLY = "apply"
    KEEP = "keep"
    MERGE = "merge"


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """One Hugging Face tensor; `coded` is None where the action needs no bytes of it."""

    name: str
    dtype: str  # torch's name without the prefix: "bfloat16"
    shape: tuple[int, ...]
    coded: EncodedTensor | None = None

    @property
    def elements(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """`target` is the version after the action (-1: none), `checksum` that of all its weights."""

    action: Action
    pieces: tuple[Piece, ...]
    base: int = -1
    base_checksum: int = 0
    target: int = NO_VERSION
    checksum: int = 0
    scale: float = 0.0  # of the factors, with `merge`
    factors: str = ""  # their type, to which merged weights are rounded
    body_bytes: int = 0
    body_digest: bytes = b""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A message that passed the checks."""

    header: Header
    body: memoryview

    def parts(self) -> Iterator[tuple[Piece, memoryview]]:
        """Every piece and its bytes."""
        start = 0
        for piece in self.header.pieces:
            size = sum(piece.coded.sizes) if piece.coded else 0
            yield piece, self.body[start : start + size]
            start += size


def seal(header: Header, streams: Iterable[bytes] = ()) -> bytes:
    """The message of `header` (its body fields are filled in here) and the pieces' streams in order."""
    body = b"".join(streams)
    header = msgspec.structs.replace(header, body_bytes=len(body), body_digest=_digest(body))
    packed = zstandard.compress(msgspec.msgpack.encode(header))
    return b"".join((PREFIX.pack(MAGIC, len(packed), _digest(packed)), packed, body))


def open_payload(data: memoryview) -> Opened:
    """Check a message from its first to its last byte. Raises PayloadError."""
    if len(data) < PREFIX.size:
        raise PayloadError(f"a message of {len(data)} bytes; its prefix alone has {PREFIX.size}")
    magic, length, digest = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError(f"a message that starts with {magic!r}, not {MAGIC!r}")
    packed = data[PREFIX.size : PREFIX.size + length]
    if _digest(packed) != digest:
        raise PayloadError(f"the header ({len(packed)} of {length} bytes) does not have the digest it came with")
    try:
        if zstandard.frame_content_size(packed) > MAX_HEADER_BYTES:
            raise PayloadError(f"a header of {zstandard.frame_content_size(packed)} bytes; at most {MAX_HEADER_BYTES}")
        header = msgspec.msgpack.decode(zstandard.decompress(packed), type=Header)
    except (msgspec.DecodeError, zstandard.ZstdError) as error:
        raise PayloadError(f"the header cannot be read: {error}") from error
    body = data[PREFIX.size + length :]
    if len(body) != header.body_bytes:
        raise PayloadError(f"a body of {len(body)} bytes where the header gives {header.body_bytes}")
    if _digest(body) != header.body_digest:
        raise PayloadError("the body does not have the digest the header gives")
    for piece in header.pieces:
        _check_coded(piece)
    described = sum(sum(piece.coded.sizes) for piece in header.pieces if piece.coded)
    if described != header.body_bytes:
        raise PayloadError(f"pieces of {described} bytes in a body of {header.body_bytes}")
    return Opened(header=header, body=body)


def _check_coded(piece: Piece) -> None:
    """Refuse counts that a tensor of this size cannot have, before anything is made as large as they say."""
    coded = piece.coded
    if min(piece.shape, default=1) < 0 or (coded and min((0, *coded.sizes)) < 0):
        raise PayloadError(f"{piece.name} {piece.shape} has sizes below 0")
    if coded is None or coded.coding is Coding.LOW_RANK:
        return
    written = piece.elements if coded.coding is Coding.SHIFTED else coded.changed
    counts = (coded.changed <= piece.elements, coded.escapes <= written, coded.low_bits <= 32, coded.high_planes <= 4)
    if not all(counts) or min(coded.changed, coded.escapes, coded.low_bits, coded.high_planes) < 0:
        raise PayloadError(f"{piece.name} of {piece.elements} elements is described by {coded}")


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
