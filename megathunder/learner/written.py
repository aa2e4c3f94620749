"""How a rank that writes a checkpoint beside its other work tells the coordinator that it has: a file of its own.

    folder/written_00003      rank 3 has written its part; the file holds what went wrong, or nothing

The folder is one that both see. Written by `snapshot.py`, read and removed by the coordinator's `persistence.py`.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "written_"


def tell(folder: Path, rank: int, error: str = "") -> None:
    """This rank has written its part, or could not: `error`."""
    unfinished = folder / f".{_PREFIX}{rank:05d}"
    unfinished.write_text(error)
    unfinished.rename(folder / f"{_PREFIX}{rank:05d}")


def heard(folder: Path) -> dict[int, str]:
    """Rank -> what went wrong, empty where nothing did, of those that have told."""
    return {int(path.name.removeprefix(_PREFIX)): path.read_text() for path in folder.glob(f"{_PREFIX}*")}


def forget(folder: Path) -> None:
    """Remove what the ranks told."""
    for path in folder.glob(f"{_PREFIX}*"):
        path.unlink()
