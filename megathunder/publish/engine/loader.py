"""Our weight loader inside a rollout server: receive, check, write in place, check again, remember what to answer.

    receive -> open (digests) -> base -> places -> write -> checksum over the engine's own parameters -> ServerWeights

With tensor parallelism every rank does it for its part; they agree before the first writes, and on the outcome.

Everything up to `write` leaves the weights as they were, so a message that is refused changes nothing. A message that
fails later leaves the server without a version: it will be sent the full weights. Called by the server through
`--custom-weight-loader`; it never raises, since an exception there would end the server: what went wrong is in
`ServerWeights`, which the sender asks for afterwards.
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

from megathunder.publish.bits import uint_dtype
from megathunder.publish.checksum import MASK, piece_checksum
from megathunder.publish.delta.apply import apply_change
from megathunder.publish.delta.coding import Change, Coding, decode
from megathunder.publish.engine.base import Base, check_factors, is_adapted
from megathunder.publish.engine.fused_layout import FusedLayout, ShardView
from megathunder.publish.envelope import (
    ACKNOWLEDGEMENT,
    ENVELOPE,
    Envelope,
    InFile,
    InGroup,
    Inline,
    ServerWeights,
    as_parameter,
    from_tensor,
)
from megathunder.publish.payload import NO_VERSION, Action, Header, Opened, PayloadError, Piece, open_payload

log = logging.getLogger(__name__)
STATE, BASE = "megathunder_held", "megathunder_base"
WITHOUT_VERSION = (Action.FILL, Action.MERGE)  # until an adoption


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
        value &= MASK
        if self.ranks == 1:
            return value
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
    before: ServerWeights = getattr(model, STATE, ServerWeights(serial=-1))
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


def _act(model: nn.Module, envelope: Envelope, before: ServerWeights) -> ServerWeights:
    shards, opened, places, error = Shards(), None, None, ""
    base: Base | None = getattr(model, BASE, None)
    try:
        data = _receive(envelope, next(model.parameters()).device)
        opened = open_payload(memoryview(data))
        places = _check(model, opened.header, before, shards, base)
    except Exception as problem:  # any: an exception would end the server
        error = f"{type(problem).__name__}: {problem}" if not isinstance(problem, PayloadError) else str(problem)
    error = shards.all_agree(error)
    held = msgspec.structs.replace(before, serial=envelope.serial, error=error, changed=False)
    if error:
        return held
    if opened.header.action is Action.KEEP:
        return _keep(model, opened.header, places, held, shards)
    writes = sum(_writes(piece) for piece in opened.header.pieces) > 0
    try:
        own_checksum = _write(opened, places, base)
    except Exception as problem:
        error = f"after it began to write, {type(problem).__name__}: {problem}"
    if error := shards.all_agree(error):
        return msgspec.structs.replace(held, version=-1, checksum=0, error=error, changed=True)
    return _concluded(opened.header, held, shards.sum(own_checksum), changed=writes)


def _check(model: nn.Module, header: Header, before: ServerWeights, shards: Shards, base: Base | None) -> FusedLayout:
    """FusedLayout for every piece. Raises PayloadError where the message does not fit these weights."""
    held, based = (before.version, before.checksum), (header.base, header.base_checksum)
    if header.action is Action.APPLY and held != based:
        raise PayloadError(
            f"a change from version {based[0]} (checksum {based[1]:016x}) for weights of version {held[0]} "
            f"(checksum {held[1]:016x})"
        )
    if header.action is Action.MERGE:
        if base is None or not base.has(header):
            kept = "none is kept" if base is None else f"the one kept has {base.checksum:016x}"
            raise PayloadError(f"adapters for a base with checksum {header.base_checksum:016x}; {kept}")
        check_factors(header)
    elif header.action is not Action.KEEP and any(map(is_adapted, header.pieces)):
        raise PayloadError(f"factors of adapters in a message to {header.action.value}")
    if header.action in (Action.ADOPT, Action.APPLY) and header.target != NO_VERSION:
        _check_version(header, before)
    parameters = dict(model.named_parameters())
    places = FusedLayout(parameters, header.pieces, rank=shards.rank, ranks=shards.ranks)
    if header.action is not Action.FILL:
        places.check_complete()
    return places


def _check_version(header: Header, before: ServerWeights) -> None:
    if header.target < before.version:
        raise PayloadError(f"version {header.target} after version {before.version}; versions only grow")
    if header.target == before.version and header.checksum != before.checksum:
        raise PayloadError(
            f"version {header.target} with checksum {header.checksum:016x} after another one with "
            f"{before.checksum:016x}: does a second learner publish to this server?"
        )


def _writes(piece: Piece) -> bool:
    return piece.coded is not None and piece.coded.coding is not Coding.SAME


def _write(opened: Opened, places: FusedLayout, base: Base | None) -> int:
    """This rank's part of the checksum after writing; 0 where the action leaves the weights without a version."""
    header = opened.header
    for piece, data in opened.parts():
        if is_adapted(piece):
            base.merge(piece, data, places[piece.name], header)
        elif _writes(piece):
            _put(piece, decode(piece.coded, data, piece.elements, uint_dtype(piece.dtype)), places[piece.name])
    if header.action in WITHOUT_VERSION:
        return 0
    return sum(_checksum(piece, places[piece.name]) for piece in header.pieces)


def _concluded(header: Header, held: ServerWeights, checksum: int, *, changed: bool) -> ServerWeights:
    """What the server holds now; `checksum` is that of all ranks."""
    if header.action in WITHOUT_VERSION:
        return msgspec.structs.replace(held, version=-1, checksum=0, changed=changed)
    if checksum != header.checksum:
        error = f"the engine's weights have checksum {checksum:016x}, those sent {header.checksum:016x}"
        return msgspec.structs.replace(held, version=-1, checksum=checksum, error=error, changed=changed)
    return msgspec.structs.replace(held, version=header.target, checksum=checksum, changed=changed)


def _keep(model: nn.Module, header: Header, places: FusedLayout, held: ServerWeights, shards: Shards) -> ServerWeights:
    """Keep the engine's weights as the base, where they are the base; one that is kept already stays."""
    base: Base | None = getattr(model, BASE, None)
    if base is not None and base.has(header):
        return held
    checksum = shards.sum(sum(_checksum(piece, places[piece.name]) for piece in header.pieces))
    if checksum != header.checksum:
        error = f"the engine's weights have checksum {checksum:016x}, the frozen base {header.checksum:016x}"
        return msgspec.structs.replace(held, error=error)
    setattr(model, BASE, Base.keep(header, places))
    return held


def _put(piece: Piece, change: Change, place: ShardView) -> None:
    if place.view.numel():
        apply_change(place.view, change, piece.shape, row=place.row, column=place.column)


def _checksum(piece: Piece, place: ShardView) -> int:
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
