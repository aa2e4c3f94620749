"""Checkpoint folders that are complete or do not count.

    .update_00005.partial/  filled, every file and folder flushed to disk
       -> renamed            update_00005/
       -> marked             update_00005/COMPLETE      names and sizes of all files, written last

A folder without its marker, or with a file that is missing or of another size, is skipped: it is no checkpoint. Keeping
the newest n deletes older complete ones only, so the last good one stays whatever lies beside it. Called by the
coordinator, which alone writes here; and, to read, by the process that starts a run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

MARKER = "COMPLETE"
PREFIX = "update_"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the folder held when it was complete: path relative to it -> bytes."""

    sizes: dict[str, int]


def begin(parent: Path, update: int) -> Path:
    """An empty folder to fill. What an interrupted save left behind goes."""
    for stale in (*parent.glob(f".{PREFIX}*.partial"), *parent.glob(f".{PREFIX}*.old")):
        shutil.rmtree(stale)
    partial = parent / f".{PREFIX}{update:05d}.partial"
    partial.mkdir(parents=True)
    return partial


def commit(partial: Path) -> Path:
    """Make what `begin` gave a checkpoint; returns its folder."""
    for path in (*_files(partial), *(p for p in partial.rglob("*") if p.is_dir()), partial):
        _flush(path)
    final = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
    if final.exists():  # saved by an earlier run and found defective, or left behind by one that was resumed before it
        final.rename(old := partial.with_suffix(".old"))
        shutil.rmtree(old)
    partial.rename(final)
    _flush(final.parent)
    marker = Marker(sizes={str(path.relative_to(final)): path.stat().st_size for path in _files(final)})
    unfinished = final / f".{MARKER}"
    unfinished.write_bytes(msgspec.json.encode(marker))
    _flush(unfinished)
    unfinished.rename(final / MARKER)
    _flush(final)
    return final


def defect(folder: Path) -> str:
    """Why `folder` is no checkpoint; empty when it is one."""
    try:
        marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=Marker)
    except FileNotFoundError:
        return f"it has no {MARKER}: the save did not end"
    except msgspec.DecodeError:
        return f"its {MARKER} cannot be read"
    for name, size in marker.sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return ""


def newest(parent: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint; `warn` is told of every newer folder that is none."""
    for folder in reversed(_folders(parent)):
        if why := defect(folder):
            warn(f"{folder} is skipped: {why}")
        else:
            return folder
    return None


def prune(parent: Path, keep: int) -> None:
    """Delete all but the newest `keep` (>= 1) complete checkpoints, and defective ones older than the newest."""
    complete = [folder for folder in _folders(parent) if not defect(folder)]
    kept = complete[-keep:]
    for folder in _folders(parent):
        if kept and folder not in kept and _number(folder) < _number(kept[-1]):
            (folder / MARKER).unlink(missing_ok=True)  # first: half deleted, it must not count
            shutil.rmtree(folder)


def _folders(parent: Path) -> list[Path]:
    """Every folder named as a checkpoint, oldest first."""
    named = (p for p in parent.glob(f"{PREFIX}*") if p.is_dir() and p.name.removeprefix(PREFIX).isdigit())
    return sorted(named, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix(PREFIX))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
