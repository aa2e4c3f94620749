"""MessagePack over zmq between the coordinator and the learner's cells: encoding, nothing else.

Called by `link.py` (a cell) and `learner_client.py` (the coordinator). A message that does not decode as the expected
union is refused; nothing on this wire is ever unpickled.
"""

from __future__ import annotations

import msgspec

from megathunder.types import Command, Reply

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """The bytes of one command or reply."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """A command; msgspec.ValidationError when the bytes are anything else."""
    return _commands.decode(data)


def decode_reply(data: bytes) -> Reply:
    """A reply; msgspec.ValidationError when the bytes are anything else."""
    return _replies.decode(data)
