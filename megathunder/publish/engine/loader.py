"""Our weight loader inside a rollout server: receive, check, write in place, check again, remember what to answer.

    receive -> open (digests) -> base -> places -> write -> checksum over the engine's own parameters -> Held

Everything up to `write` leaves the weights as they were, so a message that is refused changes nothing. A message that
fails later leaves the server without a version: it will be sent the full weights. Called by the server through
`--custom-weight-loader`; it never raises, since an exception there would end the server: what went wrong is in `Held`,
which the sender asks for afterwards.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _world

from megathunder.publish.checksum import MASK, piece_checksum
from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.coding import Change, Coding, decode
from megathunder.publish.engine.places import Place, Places
from megathunder.publish.envelope import (
    ACKNOWLEDGEMENT,
    ENVELOPE,
    Envelope,
    Held,
    InFile,
    InGroup,
    Inline,
    as_parameter,
    from_tensor,
)
from megathunder.publish.payload import Action, Header, Opened, PayloadError, Piece, open_payload
from megathunder.publish.words import word_of

log = logging.getLogger(__name__)
STATE = "megathunder_held"


class Shards:
    """This process among the engine's tensor-parallel ranks; one rank where the engine is not distributed."""

    def __init__(self) -> None:
        self.rank, self.ranks, self._group = 0, 1, None
        engine = sys.modules.get("sglang.srt.distributed")  # a server has imported it long before weights come
        if engine is None:
            return
        group = engine.get_tp_group()
        self.rank, self.ranks, self._group = group.rank_in_group, group.world_size, group.cpu_group

    def sum(self, value: int) -> int:
        """Sum over ranks modulo 2^64."""
        if self.ranks == 1:
            return value & MASK
        total = torch.tensor([value if value < 1 << 63 else value - (1 << 64)], dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return int(total) & MASK

    def all_agree(self, error: str) -> str:
        """The first error of any rank, so that all of them write or none does."""
        if self.ranks == 1:
            return error
        errors: list[str] = [""] * self.ranks
        dist.all_gather_object(errors, error, group=self._group)
        return next(filter(None, errors), "")


@torch.no_grad()
def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Act on the one envelope in `named_tensors`; the answer is kept on `model` until the next one."""
    started = time.monotonic()
    before: Held = getattr(model, STATE, Held(serial=-1))
    held = msgspec.structs.replace(before, serial=-1, changed=False, error="the message has no envelope")
    try:
        envelope = from_tensor(dict(named_tensors)[ENVELOPE])
    except (KeyError, msgspec.DecodeError) as error:
        held = msgspec.structs.replace(held, error=f"the envelope cannot be read: {error!r}")
    else:
        held = _act(model, envelope, before)
    held = msgspec.structs.replace(held, seconds=time.monotonic() - started)
    if held.error:
        log.error("weights refused: %s", held.error)
    setattr(model, STATE, held)
    model.get_weights_by_name = functools.partial(_answer, model, type(model))


def _act(model: nn.Module, envelope: Envelope, before: Held) -> Held:
    shards, opened, places, error = Shards(), None, None, ""
    try:
        data = _receive(envelope, next(model.parameters()).device)
        opened = open_payload(memoryview(data))
        places = _check(model, opened.header, before, shards)
    except Exception as problem:  # any: an exception would end the server
        error = f"{type(problem).__name__}: {problem}" if not isinstance(problem, PayloadError) else str(problem)
    error = shards.all_agree(error)
    held = msgspec.structs.replace(before, serial=envelope.serial, error=error, changed=False)
    if error:
        return held
    try:
        return _write(opened, places, held, shards)
    except Exception as problem:
        error = f"after it began to write, {type(problem).__name__}: {problem}"
        return msgspec.structs.replace(held, version=-1, checksum=0, error=error, changed=True)


def _check(model: nn.Module, header: Header, before: Held, shards: Shards) -> Places:
    """Places for every piece. Raises PayloadError where the message does not fit these weights."""
    held, based = (before.version, before.checksum), (header.base, header.base_checksum)
    if header.action is Action.APPLY and held != based:
        raise PayloadError(
            f"a change from version {based[0]} (checksum {based[1]:016x}) for weights of version {held[0]} "
            f"(checksum {held[1]:016x})"
        )
    if header.target < before.version and header.action is not Action.FILL:
        raise PayloadError(f"version {header.target} after version {before.version}; versions only grow")
    parameters = dict(model.named_parameters())
    places = Places(parameters, header.pieces, rank=shards.rank, ranks=shards.ranks)
    if header.action is not Action.FILL:
        places.check_complete()
    return places


def _write(opened: Opened, places: Places, held: Held, shards: Shards) -> Held:
    header = opened.header
    changed = False
    for piece, data in opened.parts():
        if piece.coded is not None and piece.coded.coding is not Coding.SAME:
            _put(piece, decode(piece.coded, data, piece.elements, word_of(piece.dtype)), places[piece.name])
            changed = True
    if header.action is Action.FILL:
        return msgspec.structs.replace(held, version=-1, checksum=0, changed=changed)
    checksum = shards.sum(sum(_checksum(piece, places[piece.name]) for piece in header.pieces))
    if checksum != header.checksum:
        error = f"the engine's weights have checksum {checksum:016x}, those sent {header.checksum:016x}"
        return msgspec.structs.replace(held, version=-1, checksum=checksum, error=error, changed=changed)
    return msgspec.structs.replace(held, version=header.target, checksum=checksum, changed=changed)


def _put(piece: Piece, change: Change, place: Place) -> None:
    if place.view.numel():
        apply_change(place.view, change, piece.shape, row=place.row, column=place.column)


def _checksum(piece: Piece, place: Place) -> int:
    if not place.counts or not place.view.numel():
        return 0
    return piece_checksum(piece.name, piece.shape, place.view, row=place.row, column=place.column)


def _receive(envelope: Envelope, device: torch.device) -> bytes | memoryview:
    source = envelope.payload
    if isinstance(source, Inline):
        return source.data
    if isinstance(source, InFile):
        data = Path(source.path).read_bytes()
        if len(data) != source.size:
            raise PayloadError(f"{source.path} has {len(data)} bytes, {source.size} were announced")
        return data
    return _from_group(source, device, envelope.timeout_s)


def _from_group(source: InGroup, device: torch.device, timeout_s: float) -> memoryview:
    """Every rank of the engine takes part in the broadcast of rank 0, the learner."""
    named = [group for group, name in _world.pg_names.items() if name == source.group]
    if not named:
        raise PayloadError(f"this server has not joined the group {source.group}")
    on_device = device if dist.get_backend(named[0]) == "nccl" else torch.device("cpu")
    buffer = torch.empty(source.size, dtype=torch.uint8, device=on_device)
    work = dist.broadcast(buffer, 0, group=named[0], async_op=True)
    if not work.wait(timedelta(seconds=timeout_s)):
        raise PayloadError(f"{source.size} bytes did not arrive in {source.group} within {timeout_s:.0f} s")
    return memoryview(buffer.cpu().numpy())


def _answer(model: nn.Module, kind: type[nn.Module], name: str, *arguments: Any, **options: Any) -> Any:
    """The server's parameter query: our answer under our name, anything else as the engine would."""
    if name == ACKNOWLEDGEMENT:
        return as_parameter(getattr(model, STATE))
    query: Callable[..., Any] | None = getattr(kind, "get_weights_by_name", None)
    return query(model, name, *arguments, **options) if query else None
