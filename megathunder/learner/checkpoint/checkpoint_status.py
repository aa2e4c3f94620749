"""How a rank that writes a checkpoint beside its other work tells the coordinator that it has: a file of its own.

    folder/.written_00003     room for what rank 3 may have to tell, taken before: on a full disk there is none left
           written_00003      rank 3 has written its part; the file holds what went wrong, or blanks

The folder is one that both see. Written by `snapshot.py`, read and removed by the coordinator's `persistence.py`.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "written_"
ROOM_BYTES = 4096


def reserve(folder: Path, rank: int) -> None:
    """Make sure that this rank can tell. Raises what the file system does."""
    (folder / f".{_PREFIX}{rank:05d}").write_bytes(b" " * ROOM_BYTES)


def write(folder: Path, rank: int, error: str = "") -> None:
    """This rank has written its part, or could not: `error`."""
    unfinished = folder / f".{_PREFIX}{rank:05d}"
    unfinished.touch()
    with unfinished.open("r+b") as file:  # in place
        file.write(error.encode()[:ROOM_BYTES])
    unfinished.rename(folder / f"{_PREFIX}{rank:05d}")


def read_all(folder: Path) -> dict[int, str]:
    """Rank -> what went wrong, empty where nothing did, of those that have told."""
    told = {int(path.name.removeprefix(_PREFIX)): path.read_bytes() for path in folder.glob(f"{_PREFIX}*")}
    return {rank: said.decode(errors="replace").strip() for rank, said in told.items()}


def clear(folder: Path) -> None:
    """Remove what the ranks told."""
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink()
