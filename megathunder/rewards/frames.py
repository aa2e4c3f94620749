"""What goes between this process and a reward process: MessagePack, in which integers of any size have a place.

Called by processes.py and worker.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

LARGE_INTEGER = 1  # the code of the extension: its decimal digits


def encode(value: object) -> bytes:
    """`value` as MessagePack; what has no form in it goes as text."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=str)
    except OverflowError:  # an integer of more than 64 bits, as answers of mathematical tasks may be
        return msgspec.msgpack.encode(_replaced(msgspec.to_builtins(value, enc_hook=str)), enc_hook=str)


def decode(data: bytes) -> Any:
    """The value, plain."""
    return msgspec.msgpack.decode(data, ext_hook=_large_integer)


def _replaced(value: Any) -> Any:
    match value:
        case dict():
            return {name: _replaced(part) for name, part in value.items()}
        case list() | tuple():
            return [_replaced(part) for part in value]
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(LARGE_INTEGER, str(value).encode())
    return value


def _large_integer(code: int, digits: memoryview) -> int:
    assert code == LARGE_INTEGER, f"extension {code}"
    return int(bytes(digits))
