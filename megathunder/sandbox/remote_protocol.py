"""What a pool and a sandbox server say to each other: MessagePack bodies of POST /sandbox, one struct a verb.

File contents travel as bytes: text that was not UTF-8 is held as surrogates here and has no encoding of its own.
Called by sandbox.remote and sandbox.serving.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from megathunder.tasks import TaskFile


class Verb(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of the requests, told apart by their names."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    path: bytes
    content: bytes
    mode: int


class Hello(Verb, frozen=True, kw_only=True):
    """Is anybody there, and does it take the key?"""


class Lease(Verb, frozen=True, kw_only=True):
    """`client` names the pool that asks, for `End`."""

    client: str
    files: list[File]
    image: str = ""


class Exec(Verb, frozen=True, kw_only=True):
    lease: str
    command: bytes
    deadline_s: float


class Upload(Verb, frozen=True, kw_only=True):
    lease: str
    files: list[File]


class Download(Verb, frozen=True, kw_only=True):
    lease: str
    path: str
    max_bytes: int


class Close(Verb, frozen=True, kw_only=True):
    lease: str


class End(Verb, frozen=True, kw_only=True):
    """Close every lease of `client`, and say what is left."""

    client: str


Request = Hello | Lease | Exec | Upload | Download | Close | End


class Nothing(msgspec.Struct, frozen=True):
    """Done."""


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    lease: str


class Content(msgspec.Struct, frozen=True, kw_only=True):
    data: bytes | None


class Left(msgspec.Struct, frozen=True, kw_only=True):
    leaks: list[str]


def packed(files: Iterable[TaskFile]) -> list[File]:
    """Files as they travel."""
    return [
        File(
            path=file.path.encode(errors="surrogateescape"),
            content=file.content.encode(errors="surrogateescape"),
            mode=file.mode,
        )
        for file in files
    ]


def unpacked(files: Iterable[File]) -> list[TaskFile]:
    """Files as they are used."""
    return [
        TaskFile(
            path=file.path.decode(errors="surrogateescape"),
            content=file.content.decode(errors="surrogateescape"),
            mode=file.mode,
        )
        for file in files
    ]
