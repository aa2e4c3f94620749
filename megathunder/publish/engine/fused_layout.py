"""Where a Hugging Face tensor lies in SGLang's parameters: fused projections, stacked experts, shards.

    Hugging Face                                 SGLang                                      part
    X.q_proj | k_proj | v_proj  .weight, .bias   X.qkv_proj                                  rows q, then k, then v
    X.gate_proj | up_proj       .weight          X.gate_up_proj                              rows gate, then up
    X.experts.E.gate_proj | up_proj .weight      X.experts.w13_weight [E, 2I, H]             expert E, gate then up
    X.experts.E.down_proj .weight                X.experts.w2_weight  [E, H, I]              expert E (I may be padded)
    anything else                                the same name                               all, vocabulary padding cut

With tensor parallelism a server holds a shard: rows of a column-parallel projection, columns of a row-parallel one;
what every rank holds counts once. Called by `loader.py`. Refuses a name without a place, a type or a size that does
not fit, and parameters that no tensor covers: a layout this table does not know can then not be written to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megathunder.publish.payload import PayloadError, Piece

FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
FUSABLE = re.compile(r"(.*\.)(q_proj|k_proj|v_proj|gate_proj|up_proj)(\.weight|\.bias)")
VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardView:
    """`view` is this rank's part of the tensor, at `row` and `column` of the whole; `counts` is false for a copy that
    another rank's checksum already covers."""

    view: Tensor
    row: int = 0
    column: int = 0
    counts: bool = True


class FusedLayout:
    """FusedLayout of `pieces` in `parameters`, of tensor-parallel rank `rank` of `ranks`."""

    def __init__(
        self, parameters: Mapping[str, Tensor], pieces: Sequence[Piece], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._parameters, self._rank, self._ranks = parameters, rank, ranks
        self._shapes = {piece.name: piece.shape for piece in pieces}
        self._covered: dict[str, int] = {}
        self._places = {piece.name: self._find(piece) for piece in pieces}

    def __getitem__(self, name: str) -> ShardView:
        return self._places[name]

    def check_complete(self) -> None:
        """Raise PayloadError unless every element of every parameter is covered, vocabulary padding aside."""
        for name, parameter in self._parameters.items():
            covered = self._covered.get(name, 0)
            if covered == parameter.numel() or (name in self._covered and VOCABULARY.fullmatch(name)):
                continue
            raise PayloadError(
                f"the engine's {name} has {parameter.numel()} elements, of which the message describes {covered}"
            )

    def _find(self, piece: Piece) -> ShardView:
        if expert := EXPERT.fullmatch(piece.name):
            target, view, offset = self._expert(piece, *expert.groups())
        elif (fusable := FUSABLE.fullmatch(piece.name)) and piece.name not in self._parameters:
            target, view, offset = self._fused(piece, *fusable.groups())
        else:
            target, offset = piece.name, None
            view = self._parameter(piece, target)
        place = self._shard(piece, self._trimmed(view, piece) if expert else view, offset)
        if str(place.view.dtype) != f"torch.{piece.dtype}":
            raise PayloadError(f"{piece.name} arrives as {piece.dtype}; the engine's {target} is {place.view.dtype}")
        occupied = view.numel() if expert else place.view.numel()  # an expert's own padding belongs to it
        self._covered[target] = self._covered.get(target, 0) + occupied
        return place

    def _expert(self, piece: Piece, stem: str, number: str, part: str) -> tuple[str, Tensor, int | None]:
        target = f"{stem}.w2_weight" if part == "down_proj" else f"{stem}.w13_weight"
        stacked = self._parameter(piece, target)
        if int(number) >= stacked.shape[0]:
            raise PayloadError(f"{piece.name}: the engine's {target} holds {stacked.shape[0]} experts")
        whole = stacked[int(number)]
        if part == "down_proj":
            return target, whole, None
        half = whole.shape[0] // 2
        return target, whole[:half] if part == "gate_proj" else whole[half:], None

    def _fused(self, piece: Piece, stem: str, part: str, suffix: str) -> tuple[str, Tensor, int | None]:
        """The rows of `part`, and the part's first row in the whole tensor where key-value heads are replicated."""
        fused, parts = FUSED[part]
        target = f"{stem}{fused}{suffix}"
        whole = self._parameter(piece, target)
        sizes = [self._shape(piece, f"{stem}{other}{suffix}")[0] for other in parts]
        local = [size // self._ranks for size in sizes]
        offset = None
        if fused == "qkv_proj" and sum(local) != whole.shape[0]:  # fewer key-value heads than ranks: copies of one
            held = (whole.shape[0] - local[0]) // 2
            local[1:] = [held, held]
            if part != "q_proj" and held:
                offset = self._rank * sizes[1] // self._ranks // held * held
        if sum(local) != whole.shape[0]:
            raise PayloadError(f"{piece.name}: parts of {local} rows in the engine's {target} {tuple(whole.shape)}")
        start = sum(local[: parts.index(part)])
        return target, whole[start : start + local[parts.index(part)]], offset

    def _shard(self, piece: Piece, view: Tensor, offset: int | None) -> ShardView:
        have, want, rank, ranks = tuple(view.shape), piece.shape, self._rank, self._ranks
        if have == want:
            return ShardView(view=view, counts=rank == 0)
        if VOCABULARY.fullmatch(piece.name) and have[1:] == want[1:] and have[0] * ranks >= want[0]:
            row = rank * have[0]
            return ShardView(view=view[: max(0, min(have[0], want[0] - row))], row=row)
        if offset is not None and have[1:] == want[1:] and want[0] % have[0] == 0:
            copies = have[0] * ranks // want[0]
            return ShardView(view=view, row=offset, counts=rank % copies == 0)
        if have[1:] == want[1:] and have[0] * ranks == want[0]:
            return ShardView(view=view, row=rank * have[0])
        if have[:-1] == want[:-1] and have[-1] * ranks == want[-1]:
            return ShardView(view=view, column=rank * have[-1])
        raise PayloadError(f"{piece.name} is {want}; this engine's part is {have} on rank {rank} of {ranks}")

    def _trimmed(self, view: Tensor, piece: Piece) -> Tensor:
        """Engines may pad an expert's intermediate size with zeros; not combined with shards."""
        padded = self._ranks == 1 and all(have >= want for have, want in zip(view.shape, piece.shape, strict=True))
        return view[tuple(map(slice, piece.shape))] if padded else view

    def _parameter(self, piece: Piece, target: str) -> Tensor:
        if target not in self._parameters:
            raise PayloadError(f"{piece.name}: the engine has no parameter {target}")
        return self._parameters[target].data

    def _shape(self, piece: Piece, other: str) -> tuple[int, ...]:
        if other not in self._shapes:
            raise PayloadError(f"{piece.name} without {other}, with which the engine fuses it")
        return self._shapes[other]
