"""How a payload comes to the loader, and what the loader answers.

    Envelope   -> the server's tensor update endpoint, one small byte tensor in the form that endpoint takes
    payload    inside the envelope | broadcast in a process group the server has joined | a file both can read
    ServerWeights       <- the server's parameter query, asked for the name ACKNOWLEDGEMENT: a list of byte values

`LOADER` is the name by which a server is told to use the loader (`--custom-weight-loader`). Called by publish/ on both
sides.
"""

from __future__ import annotations

import io
import pickle

import msgspec
import torch
from torch import Tensor

LOADER = "megathunder.publish.engine.loader.load"
ACKNOWLEDGEMENT = "megathunder.acknowledgement"
ENVELOPE = "megathunder.envelope"


class Inline(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    data: bytes


class InGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`size` bytes that rank 0 broadcasts in the group called `group`."""

    group: str
    size: int


class InFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    path: str
    size: int


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """`serial` comes back in the answer; receiving may take `timeout_s`."""

    serial: int
    payload: Inline | InGroup | InFile
    timeout_s: float


class ServerWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says after a message: the version and checksum of its weights (-1: none known) and, where it
    refused, why. `seconds` is what receiving, checking and writing took."""

    serial: int
    version: int = -1
    checksum: int = 0
    error: str = ""
    changed: bool = False  # whether the weights were written to
    seconds: float = 0.0


def as_tensors(envelope: Envelope) -> bytes:
    """The list [(name, byte tensor)] in the encoding of the server's endpoint, with the data in it, not beside it."""
    octets = torch.frombuffer(bytearray(msgspec.msgpack.encode(envelope)), dtype=torch.uint8)
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump([(ENVELOPE, octets)])
    return buffer.getvalue()


def from_tensor(tensor: Tensor) -> Envelope:
    """The envelope in the tensor the endpoint hands over. Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(tensor.cpu().numpy().tobytes(), type=Envelope)


def as_parameter(held: ServerWeights) -> list[float]:
    """The answer in the form of a parameter query."""
    return list(map(float, msgspec.msgpack.encode(held)))


def from_parameter(values: list[float]) -> ServerWeights:
    """The answer of a parameter query. Raises ValueError or msgspec.DecodeError."""
    return msgspec.msgpack.decode(bytes(map(int, values)), type=ServerWeights)
